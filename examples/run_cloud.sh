#!/usr/bin/env bash
# Starts the cloud of a run on this machine: bash examples/run_cloud.sh --help
exec bash "$(dirname "${BASH_SOURCE[0]}")/run_site.sh" run_cloud.sh 1 "$@"
