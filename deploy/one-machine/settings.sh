# shellcheck shell=bash disable=SC2034
# Where everything of this machine's cluster is, and what runs of it. Sourced by up.sh and down.sh.
#
# Environment: UP_FOLDER (build/up), UP_RUNS (runs), UP_CPUS (CPUs that Ray counts), UP_RAY_PORT, UP_DASHBOARD_PORT,
# UP_PROMETHEUS_PORT, UP_GRAFANA_PORT, UP_BIN (folder of `ray`); RAY_TMPDIR and RAY_AUTH_TOKEN_PATH are Ray's own.
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
up=${UP_FOLDER:-$root/build/up} runs=${UP_RUNS:-$root/runs} bin=${UP_BIN:-$root/.venv/bin}
mkdir -p "$up" "$runs"
up=$(cd "$up" && pwd) runs=$(cd "$runs" && pwd)

ray_port=${UP_RAY_PORT:-6379} dashboard_port=${UP_DASHBOARD_PORT:-8265}
prometheus_port=${UP_PROMETHEUS_PORT:-9090} grafana_port=${UP_GRAFANA_PORT:-3000}
token_file=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
ray_temp=${RAY_TMPDIR:-${TMPDIR:-/tmp}}/ray
# CPUs are tickets, not silicon: a small machine may share its cores.
cores=$(nproc)
cpus=${UP_CPUS:-$((cores > 8 ? cores : 8))}

# born PID: when it started, in clock ticks since boot. With it a number that was given anew is not taken for the old one.
born() {
    local stat
    stat=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    # After the name, which is in brackets and may hold spaces. A zombie runs no more.
    awk '$1 != "Z" {print $20}' <<<"${stat##*) }"
}

# is_up NAME: whether what build/up/NAME.pid names runs; sets pid.
is_up() {
    local when
    pid=
    [ -e "$up/$1.pid" ] && read -r pid when <"$up/$1.pid" && [ -n "$when" ] &&
        [ "$(born "$pid")" = "$when" ]
}
