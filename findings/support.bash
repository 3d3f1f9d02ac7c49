# Sourced by each finding. Makes a temporary folder with a virtual environment.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# packages REQUIREMENT...: install them; "$PYTHON" then runs with them.
packages() {
  python3 -m venv "$work/venv"
  PYTHON=$work/venv/bin/python
  "$PYTHON" -m pip install --quiet --disable-pip-version-check "$@" 2>"$work/pip" || { cat "$work/pip" >&2; exit 1; }
}

# node_packages NAME@VERSION...: install them; node, run in "$work", then finds them.
node_packages() {
  (cd "$work" && npm init --yes && npm install --no-audit --no-fund "$@") >"$work/npm" 2>&1 || { cat "$work/npm" >&2; exit 1; }
}

# COMMAND | expect TEXT: fail unless the output of the command is the text.
expect() {
  if diff -u <(printf '%s\n' "$1") - >"$work/diff"; then
    echo "as stated: $(basename "$0")"
  else
    echo "$(basename "$0") behaves otherwise now:" >&2
    cat "$work/diff" >&2
    return 1
  fi
}
