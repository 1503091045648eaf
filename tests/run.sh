#!/usr/bin/env bash
# Sets up (the same way as examples/quickstart.sh), then runs every static check and the whole test suite.
#
#   bash tests/run.sh                        all of it
#   bash tests/run.sh tests/test_launch.py   pytest's own arguments: what to run and how; the static checks are left out
#   bash tests/run.sh -m parity_full         the exhaustive parity matrix, which a plain run leaves out
#
# Safe to run again: a set-up that is current takes no time.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR/../examples
. "$(dirname "${BASH_SOURCE[0]}")/../examples/setup_env.sh"
case "${1:-}" in -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;; esac

ldt_setup
cd "$LDT_ROOT"

# Builds of DeepSpeed operators that a killed test leaves half done must not block the user's own runs.
scratch="$(mktemp -d "${TMPDIR:-/tmp}/ds_ldt_tests.XXXXXX")"
trap 'rm -rf "$scratch"' EXIT
export TORCH_EXTENSIONS_DIR="$scratch/torch_extensions"
# Several processes share the cores: one thread each is faster, and makes sums repeatable.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

lint=0
if [ "$#" -eq 0 ]; then bash tests/lint.sh || lint=$?; fi
tests=0
python -m pytest "$@" || tests=$?

printf '\n'
if [ "$lint" -ne 0 ]; then ldt_say "static checks FAILED (see above): bash tests/lint.sh repeats them alone"; fi
if [ "$tests" -ne 0 ]; then ldt_say "tests FAILED (see above): bash tests/run.sh tests/FILE.py::NAME repeats one"; fi
if [ "$lint" -ne 0 ] || [ "$tests" -ne 0 ]; then exit 1; fi
ldt_say "What you have now: ds_ldt installed in $VIRTUAL_ENV, and every check of this run passed."
ldt_say "What to do next:   bash examples/quickstart.sh   (fine-tunes a real 135M model over an edge and a cloud)"
