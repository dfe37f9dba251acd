#!/usr/bin/env bash
# See to it that there is a Chromium for the WebArena environment; prints its path.
#
#   bash scripts/chromium.sh
#
# One that is there already is used. Otherwise root installs Debian's; anyone else is told how to.
set -euo pipefail

find_chromium() {
    local name
    for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
        command -v "$name" && return
    done
    compgen -G "${PLAYWRIGHT_BROWSERS_PATH:-$HOME/.cache/ms-playwright}/chromium-*/chrome-linux*/chrome" | tail -n 1 | grep .
}

find_chromium && exit

if command -v apt-get >/dev/null && [[ $(id -u) == 0 ]]; then
    echo "chromium: installing Debian's" >&2
    apt-get update -qq >&2
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends chromium >&2
    find_chromium && exit
fi
echo "chromium: there is none, and this user cannot install it." \
    "Run: sudo apt-get install chromium, or: .venv/bin/playwright install --with-deps chromium" >&2
exit 1
