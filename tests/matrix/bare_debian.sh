#!/bin/bash
# Installs a wheel on a Debian that has only python3 and python3-venv, and runs FOLDER/train.py there on two workers:
#   unshare --mount bare_debian.sh WHEEL FOLDER
# The root file system is FOLDER/root: as root, with this machine's release of Debian and the mirror that it uses.
set -euo pipefail
wheel=$1 root=$2/root
mirror=$({ cat /etc/apt/sources.list.d/debian.sources /etc/apt/sources.list 2>/dev/null || true; } |
    sed -nE 's/^(URIs:|deb) +(\[[^]]*\] *)?([^ ]+).*/\3/p' | head -1)
# shellcheck source=/dev/null
release=$(. /etc/os-release && echo "$VERSION_CODENAME")
mmdebstrap --quiet --variant=minbase --include=python3,python3-venv,ca-certificates "$release" "$root" "$mirror"
cp "$wheel" "$2/train.py" "$(dirname "$0")/../../constraints.txt" "$root/opt/"
# How this machine reaches the package index.
cp /etc/resolv.conf "$root/etc/"
cp /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
[ ! -e /etc/pip.conf ] || cp /etc/pip.conf "$root/etc/"
mkdir "$root/opt/pip"
mount --bind "$(python3 -m pip cache dir)" "$root/opt/pip"
mount -t proc proc "$root/proc"
mount --bind /dev "$root/dev"
inside() {
    env -i PATH=/usr/bin:/bin HOME=/opt OMP_NUM_THREADS=1 PIP_CACHE_DIR=/opt/pip "$(command -v chroot)" "$root" "$@"
}
inside python3 -m venv /opt/venv
inside /opt/venv/bin/pip install --quiet -c /opt/constraints.txt "/opt/${wheel##*/}"
inside /opt/venv/bin/hvdrun -np 2 /opt/venv/bin/python /opt/train.py
