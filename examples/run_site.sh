#!/usr/bin/env bash
# Starts one machine of one site with the deepspeed launcher. Called by run_edge.sh and run_cloud.sh.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

usage() {
    cat <<EOF
usage: bash examples/$1 [options] SCRIPT [arguments of the script]

  --hostfile FILE      which machine runs how many ranks, the edge first   (examples/hostfile)
  --node_rank K        line of this machine in it, counted from 0          ($2)
  --master_addr HOST   address of the edge, as seen from here              (127.0.0.1)
  --master_port PORT   a TCP port of the edge that can be reached          (29500)
  --interface NAME     network interface that leads to the other site      (found by the route to HOST)
  --help

Run it on each machine with the same hostfile, address and port. All ranks wait for each other at the start, and the
exit status is not 0 when a rank of this machine failed.
EOF
}

die() { printf '[%s] error: %s\n' "$name" "$*" >&2; exit 2; }

name="$1" default_rank="$2"
shift 2
hostfile="$here/hostfile" node_rank="$default_rank" address=127.0.0.1 port=29500 interface=
while [ "$#" -gt 0 ]; do
    case "$1" in
        -h | --help) usage "$name" "$default_rank"; exit 0 ;;
        --hostfile | --node_rank | --master_addr | --master_port | --interface)
            [ "$#" -ge 2 ] || die "$1 needs a value"
            case "$1" in
                --hostfile) hostfile="$2" ;;
                --node_rank) node_rank="$2" ;;
                --master_addr) address="$2" ;;
                --master_port) port="$2" ;;
                --interface) interface="$2" ;;
            esac
            shift 2 ;;
        -*) die "unknown option $1 (options of the script come after its name; --help lists ours)" ;;
        *) break ;;
    esac
done
[ "$#" -gt 0 ] || die "no script given (bash examples/$name --help)"
[ -f "$1" ] || die "script '$1' does not exist"

# The launcher takes a hostfile that it cannot find for "use this machine alone", and starts the wrong world in silence.
[ -f "$hostfile" ] || die "hostfile '$hostfile' does not exist: both sites need the same one (see examples/hostfile)"
slots=() total=0
while read -r line; do
    case "$line" in '' | '#'*) continue ;; esac
    [[ "$line" =~ ^[^[:space:]]+[[:space:]]+slots=([1-9][0-9]*)[[:space:]]*$ ]] ||
        die "hostfile '$hostfile': line '$line' is not of the form 'NAME slots=COUNT'"
    slots+=("${BASH_REMATCH[1]}")
    total=$((total + BASH_REMATCH[1]))
done < <(cat "$hostfile"; echo)
[ "${#slots[@]}" -ge 2 ] || die "hostfile '$hostfile' names ${#slots[@]} machine(s), expected the edge and at least one of the cloud"
[[ "$node_rank" =~ ^[0-9]+$ ]] && [ "$node_rank" -lt "${#slots[@]}" ] ||
    die "--node_rank is '$node_rank', expected 0 to $((${#slots[@]} - 1)): hostfile '$hostfile' names ${#slots[@]} machines"
[[ "$port" =~ ^[0-9]+$ ]] || die "--master_port is '$port', expected a number"

if ! command -v deepspeed >/dev/null 2>&1; then
    [ -x "$here/../.venv/bin/deepspeed" ] || die "the deepspeed launcher is not on the PATH: activate the virtualenv that has ds_ldt"
    PATH="$(cd "$here/../.venv/bin" && pwd):$PATH"
fi

# gloo listens on the interface of the machine's own name, which is often the loopback one: say which leads to the edge.
find_interface() {
    case "$address" in
        127.* | localhost | ::1) if [ "$(uname)" = Darwin ]; then echo lo0; else echo lo; fi; return ;;
    esac
    command -v ip >/dev/null 2>&1 || return 0
    # The edge looks for the interface that has the address, everybody else for the one that leads to it.
    local own
    own="$(ip -o addr show 2>/dev/null | awk -v address="$address" '{ split($4, part, "/"); if (part[1] == address) print $2 }')"
    if [ -n "$own" ]; then echo "${own%%$'\n'*}"; return; fi
    ip route get "$address" 2>/dev/null | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1
}
[ -n "$interface" ] || interface="${GLOO_SOCKET_IFNAME:-$(find_interface)}"
if [ -n "$interface" ]; then export GLOO_SOCKET_IFNAME="$interface"; fi

# Ranks of one machine share its cores.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
    cores="$(getconf _NPROCESSORS_ONLN)"
    OMP_NUM_THREADS=$((cores / slots[node_rank] > 0 ? cores / slots[node_rank] : 1))
    export OMP_NUM_THREADS
fi

printf '[%s] machine %s of %s, %s of %s ranks, meeting at %s:%s over %s\n' "$name" "$node_rank" "${#slots[@]}" \
    "${slots[node_rank]}" "$total" "$address" "$port" "${interface:-the default interface}"

# The launcher does not pass a signal on to what it started, so it gets a process group of its own and we signal that.
set -m
deepspeed --no_ssh --node_rank="$node_rank" --hostfile="$hostfile" --master_addr="$address" --master_port="$port" \
    ${LDT_LAUNCHER_ARGS:-} "$@" &
launcher=$!
set +m

stop() {
    trap '' HUP INT QUIT TERM
    printf '[%s] stopping the ranks of this machine\n' "$name" >&2
    kill -TERM -- "-$launcher" 2>/dev/null || true
    for _ in $(seq 100); do
        kill -0 -- "-$launcher" 2>/dev/null || break
        sleep 0.1
    done
    kill -KILL -- "-$launcher" 2>/dev/null || true
    exit "$1"
}
trap 'stop 129' HUP
trap 'stop 130' INT
trap 'stop 131' QUIT
trap 'stop 143' TERM

status=0
wait "$launcher" || status=$?
# A launcher that was killed leaves its ranks behind.
if kill -0 -- "-$launcher" 2>/dev/null; then stop "$((status ? status : 1))"; fi
if [ "$status" -ne 0 ]; then printf '[%s] failed with status %s\n' "$name" "$status" >&2; fi
exit "$status"
