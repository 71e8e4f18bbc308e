#!/bin/bash
# Takes a Python that this release of Debian lacks from a later one:  debian_python.sh 3.14 forky FOLDER
# Nothing is installed: the packages, with their own libc, are unpacked below FOLDER, whose usr/bin/python3.14 runs there.
set -euo pipefail
version=$1 release=$2 root=$(realpath -m "$3")
apt=$root/apt
[ "$(uname -m)" = x86_64 ] && command -v apt-get dpkg >/dev/null ||
    { echo "Not a Debian on x86-64: put a Python $version on the PATH"; exit 1; }
rm -rf "$root"
mkdir -p "$apt/sources" "$apt"/{state/lists,cache/archives}/partial
touch "$apt/status"
cat > "$apt/apt.conf" <<END
Dir::State "$apt/state";
Dir::State::status "$apt/status";
Dir::Cache "$apt/cache";
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "$apt/sources";
APT::Sandbox::User "";
END
# The mirror that this machine uses, and Debian's keys.
mirror=$({ cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null || true; } |
    sed -nE 's/^(URIs:|deb) +(\[[^]]*\] *)?([^ ]+).*/\3/p' | head -1)
[ -n "$mirror" ] || { echo "No mirror of Debian was found in /etc/apt: put a Python $version on the PATH"; exit 1; }
cat > "$apt/sources/debian.sources" <<END
Types: deb
URIs: $mirror
Suites: $release
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
export APT_CONFIG=$apt/apt.conf
apt-get update --quiet
apt-get install --quiet --yes --download-only --no-install-recommends "python$version-venv" libstdc++6 libgomp1
for package in "$apt"/cache/archives/*.deb; do
    dpkg -x "$package" "$root"
done
rm -rf "$apt"
# ensurepip looks for its wheels there.
sed -i "s#'/usr/share/python-wheels/'#'$root/usr/share/python-wheels/'#" "$root/usr/lib/python$version"/_sysconfigdata_*.py
mv "$root/usr/bin/python$version" "$root/usr/bin/python$version.real"
cat > "$root/usr/bin/python$version" <<END
#!/bin/sh
# "\$0" tells Python which environment it is in, and is what it calls its executable.
exec $root/usr/lib64/ld-linux-x86-64.so.2 --library-path $root/usr/lib/x86_64-linux-gnu --argv0 "\$0" \\
    $root/usr/bin/python$version.real "\$@"
END
chmod +x "$root/usr/bin/python$version"
