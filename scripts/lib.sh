# Shared by scripts/reproduce and scripts/test: find a Python, make an environment, install into it.
# Sourced, not run. Needs bash 3.2 or newer. Sets `root`, and after `setup` also `python`.

# shellcheck shell=bash
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

say() { printf '==> %s\n' "$*" >&2; }

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; }

# Prints the Python of the active environment, or nothing. conda's base environment does not count: it
# is active in every shell of most people who have it, and nobody asked for packages to go there.
active_python() {
    local prefix=${VIRTUAL_ENV:-}
    if [[ -z $prefix && -n ${CONDA_PREFIX:-} && ${CONDA_DEFAULT_ENV:-} != base ]]; then
        prefix=$CONDA_PREFIX
    fi
    [[ -z $prefix ]] || printf '%s\n' "$prefix/bin/python"
}

# Prints a Python >= 3.11 to make an environment with: the default one first, since people choose it.
find_python() {
    local name
    for name in python3 python3.13 python3.12 python3.11 python; do
        if is_new_enough "$name"; then
            command -v "$name"
            return
        fi
    done
    die "no Python 3.11 or newer found (tried python3, python3.13, python3.12, python3.11, python)." \
        "Install one, or activate an environment that has one, and run this again."
}

# make_venv PYTHON FOLDER
make_venv() {
    local log
    log=$(mktemp)
    if "$1" -m venv "$2" >"$log" 2>&1; then
        rm -f "$log"
        return
    fi
    # Debian and Ubuntu ship Python without ensurepip; a pip beside it can fill the environment.
    rm -rf "$2"
    if "$1" -m venv --without-pip "$2" >>"$log" 2>&1 \
        && "$1" -m pip --python "$2/bin/python" install --quiet pip >>"$log" 2>&1; then
        rm -f "$log"
        return
    fi
    rm -rf "$2"
    cat "$log" >&2
    rm -f "$log"
    die "$1 cannot make a virtual environment. On Debian or Ubuntu: install the package python3-venv." \
        "Or activate an environment of your own and run this again."
}

# One line that changes whenever an install could: the files that decide it, the place, the extras.
stamp_of() {
    "$1" - "$root" "$2" <<'PY'
import hashlib, pathlib, sys

root = pathlib.Path(sys.argv[1])
digest = hashlib.sha256(sys.version.encode())
for name in ("pyproject.toml", "constraints.txt"):
    digest.update((root / name).read_bytes())
print(digest.hexdigest(), sys.argv[2] or "-", root)
PY
}

# Runs "$@", and says every 20 seconds that it still does. Its output is shown only if it fails.
patiently() {
    local log ticker status=0
    log=$(mktemp)
    (
        seconds=0
        # The sleep holds none of our descriptors, or whoever reads our output would wait for it. An interrupt
        # does not reach a background job; it ends when this script has gone.
        while sleep 20 >/dev/null 2>&1 </dev/null && kill -0 $$ 2>/dev/null; do
            seconds=$((seconds + 20))
            printf '    still at it after %d s\n' "$seconds" >&2
        done
    ) &
    ticker=$!
    "$@" >"$log" 2>&1 </dev/null || status=$?
    kill "$ticker" 2>/dev/null || true
    wait "$ticker" 2>/dev/null || true
    [[ $status -eq 0 ]] || cat "$log" >&2
    rm -f "$log"
    return "$status"
}

# setup [EXTRA]: sets `python` to one whose environment holds this checkout with its EXTRA ("dev").
setup() {
    local extra=${1:-} prefix stamp="" installed
    export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PIP_NO_INPUT=1
    python=$(active_python)
    if [[ -n $python ]]; then
        [[ -x $python ]] || die "the active environment has no Python: $python does not exist."
        is_new_enough "$python" \
            || die "the active environment's Python is too old: $("$python" --version 2>&1), 3.11 or newer is" \
                "needed. Deactivate it (an environment is then made in .venv) or activate another one."
        prefix=$(cd -- "$(dirname -- "$python")/.." && pwd)
    else
        prefix=$root/.venv
        python=$prefix/bin/python
        # Made anew when half made, when its Python has gone, and when the checkout has moved.
        if [[ -e $prefix ]]; then
            installed=$(cat "$prefix/.rmsrepro-installed" 2>/dev/null || true)
            if ! is_new_enough "$python" || [[ ${installed#* * } != "$root" ]]; then
                rm -rf "$prefix"
            fi
        fi
        if [[ ! -e $prefix ]]; then
            local base
            base=$(find_python)
            say "making an environment in $prefix with $("$base" --version 2>&1)"
            make_venv "$base" "$prefix"
        fi
    fi

    stamp=$prefix/.rmsrepro-installed
    installed=$(cat "$stamp" 2>/dev/null || true)
    # An environment that has the dev extra has everything that one without it has.
    if [[ $installed != "$(stamp_of "$python" "$extra")" && $installed != "$(stamp_of "$python" dev)" ]]; then
        say "installing rmsrepro${extra:+ with its $extra tools} (the first time takes minutes)"
        rm -f "$stamp"
        patiently "$python" -m pip install --quiet \
            --constraint "$root/constraints.txt" --editable "$root${extra:+[$extra]}" \
            || die "the installation failed: see pip's message above."
        stamp_of "$python" "$extra" >"$stamp"
    fi
    PATH=$prefix/bin:$PATH
    export PATH
}
