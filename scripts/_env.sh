# Sourced by the scripts here. `prepare EXTRA` makes .venv in the repository's root and installs crossdock into it with the
# files whose hashes are in requirements*.lock, and torch of the version in constraints.txt; when nothing has changed since, it does
# nothing. It leaves the shell in the root. `--torch cpu`, anywhere among a script's arguments, is taken out of them: torch then
# comes from its own index of builds for CPUs, and otherwise from where pip looks.

say() { printf '%s\n' "$*" >&2; }

TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
torch=
left=$#
while [ "$left" -gt 0 ]; do
    argument=$1
    shift
    left=$((left - 1))
    case $argument in
    --torch=*) torch=${argument#*=} ;;
    --torch)
        torch=${1-nothing}
        [ "$left" -eq 0 ] || { shift && left=$((left - 1)); }
        ;;
    *)
        set -- "$@" "$argument"
        continue
        ;;
    esac
    [ "$torch" = cpu ] || { say "--torch: $torch is not cpu, which is its only value; leave it out for a GPU" && exit 2; }
done

find_python() {
    for candidate in "${CROSSDOCK_PYTHON:-}" python3 python3.14 python3.13 python3.12 python3.11; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            printf '%s\n' "$candidate"
            return 0
        fi
    done
    say "crossdock needs Python 3.11 or later with its venv module; python3 here is $(python3 --version 2>&1 || true)."
    say "Install one (on Debian and Ubuntu: apt install python3-venv), or name one in CROSSDOCK_PYTHON."
    return 1
}

wanted_stamp() { printf '%s %s\n' "$PWD" "$(cat pyproject.toml constraints.txt requirements*.lock | cksum)"; }

is_ready() { # EXTRA; an environment with the tests' tools serves as well
    [ -x .venv/bin/python ] || return 1
    [ -z "$torch" ] || has_torch '*+cpu' || return 1
    for name in "$1" test; do
        [ -f ".venv/ready-$name" ] && [ "$(cat ".venv/ready-$name")" = "$(wanted_stamp)" ] && return 0
    done
    return 1
}

has_torch() { # VERSION, a pattern
    [ -n "$(find .venv/lib -maxdepth 3 -name "torch-$1.dist-info" 2>/dev/null)" ]
}

tell_of_cpu_build() {
    [ -n "$torch" ] || has_torch '*' || [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi >/dev/null && return
    say "No NVIDIA GPU was found. torch from PyPI is built for GPUs and downloads 2.9 GB. For its CPU build, 0.4 GB, press Ctrl-C"
    say "and add --torch cpu"
}

install() { # EXTRA
    if ! .venv/bin/python -c 'import pip' 2>/dev/null || [ "$(cat .venv/made-in 2>/dev/null)" != "$PWD" ]; then
        python=$(find_python)
        say "Making .venv with $("$python" --version 2>&1)"
        "$python" -m venv --clear .venv
        printf '%s\n' "$PWD" > .venv/made-in
    fi
    rm -f .venv/ready-*
    say "Installing crossdock and what it needs into .venv (once; a minute or more)"
    tell_of_cpu_build
    : > .venv/install.log
    phase=
    extra=$1 target='.[cpu]'
    set -- -r requirements.lock
    [ "$extra" = serve ] || { target=".[cpu,$extra]"; set -- "$@" -r requirements-test.lock; }
    [ -z "$torch" ] || has_torch '*+cpu' ||
        pip_install --no-deps --retries 1 --timeout 15 --index-url "$TORCH_CPU_INDEX" "$(grep '^torch==' constraints.txt)+cpu"
    # First everything that has hashes, then the rest: torch, what its build brings, and crossdock itself.
    pip_install --require-hashes --no-deps "$@"
    pip_install --no-build-isolation -c constraints.txt -e "$target"
    wanted_stamp > ".venv/ready-$extra"
}

pip_install() { # ARGUMENT...
    # To serve, what is imported is compiled at the first start, and the rest, most of it, never.
    [ "$extra" != serve ] || set -- --no-compile "$@"
    logged .venv/install.log .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@"
}

logged() { # LOG COMMAND...: pip, with its words in the file, and how far it is on the terminal
    log=$1
    shift
    "$@" >> "$log" 2>&1 &
    pid=$!
    # What runs in the background does not hear Ctrl-C.
    trap 'stopped 130' INT
    trap 'stopped 143' TERM
    while kill -0 "$pid" 2>/dev/null; do
        show_progress "$log"
        sleep 0.5
    done
    status=0
    wait "$pid" || status=$?
    trap - INT TERM
    [ ! -t 2 ] || printf '\r\033[K' >&2
    [ "$status" -ne 0 ] || return 0
    say "Installing failed; pip's log is in $PWD/$log. The reason:"
    reason "$log" | sed 's/^/    /' >&2
    exit 1
}

reason() { # LOG: why pip failed
    broken=$(sed -nE "s/.*connection broken by '(.*)': [^ ]*$/\1/p; /^pip\..*(Timeout|Connection|Protocol|SSL)Error: /p" "$1" |
        tail -n 1 | sed 's/<[^>]*>[:,] *//')
    if grep -q '^The conflict is caused by:' "$1"; then
        echo "pip found versions that exclude each other:"
        sed -n '/^The conflict is caused by:/,/^$/p' "$1" | sed '1d; /^$/d; s/^ */  /'
    elif grep -q '^ERROR: .*No space left on device' "$1"; then
        echo "The disk is full: No space left on device"
    elif [ -n "$broken" ] && grep -Eq 'from versions: none|Max retries exceeded|^pip\..*Error: ' "$1"; then
        echo "The package index cannot be reached: $broken"
    else
        grep -A 3 '^ERROR: ' "$1" | tail -n 8 | grep . || tail -n 5 "$1"
    fi
}

stopped() { # STATUS
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
    [ ! -t 2 ] || say
    say "Stopped before it was ready."
    exit "$1"
}

show_progress() { # LOG: a bar on a terminal, elsewhere a line for each phase
    if names=$(grep '^Installing collected packages: ' "$1"); then
        title=Installing
        total=$(printf '%s' "$names" | tr ',' '\n' | grep -c .)
        count=$(find .venv/lib -maxdepth 3 -name '*.dist-info' | wc -l)
    else
        title=Downloading
        total=$(cat requirements*.lock | grep -c '==')
        count=$(grep -c '^Collecting ' "$1" || true)
    fi
    [ "$count" -le "$total" ] || count=$total
    if [ -t 2 ]; then
        full=$((30 * count / total))
        printf '\r%-12s [%s%s] %d of %d packages\033[K' "$title" \
            "$(printf '%*s' "$full" '' | tr ' ' '#')" "$(printf '%*s' $((30 - full)) '')" "$count" "$total" >&2
    elif [ "$title" != "$phase" ]; then
        say "$title packages"
    fi
    phase=$title
}

prepare() { # EXTRA: serve or test
    cd "$(dirname "$0")/.."
    is_ready "$1" && return 0
    if command -v flock >/dev/null 2>&1; then
        # Two scripts started at once must not install into each other's work.
        exec 9> .venv.lock
        flock 9
        is_ready "$1" || install "$1"
        exec 9>&-
    else
        install "$1"
    fi
}
