#!/usr/bin/env bash
# See to it that there is a Java for the SciWorld environment; prints its path.
#
#   bash scripts/java.sh
#
# One that is there already is used. Otherwise root installs Debian's; anyone else is told how to.
set -euo pipefail

find_java() {
    local java=${JAVA_HOME:+$JAVA_HOME/bin/}java
    "$java" -version >/dev/null 2>&1 && command -v "$java"
}

find_java && exit

if command -v apt-get >/dev/null && [[ $(id -u) == 0 ]]; then
    echo "java: installing Debian's" >&2
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends default-jre-headless >&2
    find_java && exit
fi
echo "java: there is none, and this user cannot install it. Run: sudo apt-get install default-jre-headless" >&2
exit 1
