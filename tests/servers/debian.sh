#!/bin/sh
# Fetches programs of Debian that slow tests want, without installing anything: sh debian.sh FOLDER
#
# Each is taken from PATH where it is there. Otherwise its package is unpacked below FOLDER. Where that cannot be
# done (another system, no network) a line says so, the exit code is 0 all the same, and the tests are skipped.
set -eu

folder=$1
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)

fetch() {  # PACKAGE PROGRAM: a package that needs nothing but libc to run its program
    if command -v "$2" >/dev/null || [ -x "$folder/usr/bin/$2" ]; then
        return
    fi
    place=$(mktemp -d)
    chmod 755 "$place"  # apt downloads as a user of its own where it can
    if (cd "$place" && apt-get download --quiet --quiet "$1" && dpkg-deb --extract ./*.deb "$folder") >"$place/log" 2>&1; then
        echo "$1 is in $folder"
    else
        echo "$1 was not fetched; tests that need it are skipped: $(tail -n 1 "$place/log")" >&2
    fi
    rm -rf "$place"
}

fetch prometheus promtool
