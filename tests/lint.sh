#!/usr/bin/env bash
# Every static check, in order of speed; the first failure does not hide the others.
#   bash tests/lint.sh           check
#   bash tests/lint.sh --fix     let ruff repair what it can first
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
case "${1:-}" in
    "") ;;
    --fix) ruff check --fix . && ruff format . ;;
    *) sed -n '2,4s/^# \{0,1\}//p' "$0"; [ "$1" = --help ]; exit ;;
esac

failed=()
check() {
    printf '[lint] %s\n' "$*"
    "$@" || failed+=("$1 ${2:-}")
}

check ruff check .
check ruff format --check .
spelled=()
for path in ds_ldt checkpoint ds_configs examples tests docs .ci ./*.md setup.cfg pyproject.toml mkdocs.yml; do
    if [ -e "$path" ]; then spelled+=("$path"); fi
done
check codespell "${spelled[@]}"
check lint-imports
check mypy
site="$(mktemp -d)"
trap 'rm -rf "$site"' EXIT
NO_MKDOCS_2_WARNING=1 check mkdocs build --strict --quiet --site-dir "$site"
if [ "${#failed[@]}" -gt 0 ]; then
    printf '[lint] failed: %s\n' "$(IFS=,; printf '%s' "${failed[*]}")" >&2
    exit 1
fi
printf '[lint] all clean\n'
