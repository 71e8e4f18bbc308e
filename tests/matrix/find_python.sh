#!/bin/sh
# Prints the first Python of these versions that is on the PATH or installed by pyenv:  find_python.sh 3.11 3.10
versions=${PYENV_ROOT:-$HOME/.pyenv}/versions
for version in "$@"; do
    # A command of pyenv on the PATH fails if pyenv has not selected its version; free-threaded builds end in t.
    for python in "python$version" "$versions/$version"*[!t]/bin/"python$version"; do
        "$python" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null || continue
        command -v "$python"
        exit
    done
done
echo "No Python $* was found on the PATH or in $versions: install python$1 and python$1-venv, or 'pyenv install $1'" >&2
exit 1
