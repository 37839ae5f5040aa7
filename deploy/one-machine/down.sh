#!/usr/bin/env bash
# Ends what up.sh started, and the runs on it (`headway stop` beforehand ends one with a checkpoint). Logs stay.
set -euo pipefail
# shellcheck source=settings.sh
. "$(dirname "$0")/settings.sh"

# family PID: the processes of its session, and all that they started.
family() {
    ps -eo pid=,ppid=,sid= | awk -v first="$1" '
        { parent[$1] = $2; if ($3 == first) found[$1] = 1 }
        END {
            do {
                grown = 0
                for (p in parent) if (!(p in found) && parent[p] in found) { found[p] = 1; grown = 1 }
            } while (grown)
            for (p in found) print p
        }'
}

# Which of these processes still run.
still() { ps -o pid=,stat= -p "$*" | awk '$2 !~ /^Z/ {print $1}'; }

# Runs that are on this cluster.
live=()
for file in "$runs"/*/cluster.json; do
    if is_up ray && grep -qs "\"address\": \"[^\"]*:$ray_port\"" "$file"; then live+=("$(basename "$(dirname "$file")")"); fi
done

ended=
for name in grafana prometheus ray; do
    if is_up "$name"; then
        mapfile -t all < <(family "$pid")
        kill "$pid"
        for ((i = 0; i < 100 && ${#all[@]}; i++)); do
            sleep 0.2
            mapfile -t all < <(still "${all[@]}")
        done
        # What has not gone in 20 s.
        ((${#all[@]} == 0)) || kill -9 "${all[@]}" 2>/dev/null || true
        ended="$ended $name"
    fi
    rm -f "$up/$name.pid"
done
if [ -z "$ended" ]; then
    echo "nothing is up"
    exit
fi

# Where Ray was stays written down, and its clients would look for it there.
current=$ray_temp/ray_current_cluster
if [ -e "$current" ] && grep -q ":$ray_port\$" "$current"; then rm "$current"; fi
for run in "${live[@]}"; do
    rm -f "$runs/$run.targets.json"
    echo "run $run went down with it; --resume goes on from its newest checkpoint"
done
# What engines leave in /dev/shm when they are ended like this.
"$bin/python" -P -c 'from headway.actors.generation_traces import remove_traces; remove_traces("headway-")'
echo "ended:$ended; logs are in $up"
