#!/usr/bin/env bash
# Starts the edge of a run on this machine: bash examples/run_edge.sh --help
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_site.sh" run_edge.sh 0 "$@"
