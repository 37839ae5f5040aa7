#!/usr/bin/env bash
# A Ray cluster of this machine, a Prometheus that scrapes it and the runs on it, and Grafana where it is installed.
# Twice is once. down.sh ends it. settings.sh says what can be set.
set -euo pipefail
# shellcheck source=settings.sh
. "$(dirname "$0")/settings.sh"

fail() {
    echo "$1" >&2
    "$root/deploy/one-machine/down.sh" >&2
    exit 1
}

# start NAME PORT COMMAND...: in a session of its own, with NAME.pid and NAME.log; nothing when it runs already.
start() {
    local name=$1 port=$2
    shift 2
    ! is_up "$name" || return 0
    ! answers "$port" || fail "$name: port $port is taken; $root/deploy/one-machine/settings.sh names what chooses another"
    : >"$up/$name.log"
    (cd "$up" && exec setsid "$@") >"$up/$name.log" 2>&1 </dev/null &
    echo "$! $(born $!)" >"$up/$name.pid"
}

answers() { (: <"/dev/tcp/127.0.0.1/$1") 2>/dev/null; }

# wait_for NAME COMMAND...: until the command succeeds.
wait_for() {
    local name=$1 end=$((SECONDS + 120))
    shift
    until "$@"; do
        if ! is_up "$name" || ((SECONDS > end)); then fail "$name does not start: $(tail -n 15 "$up/$name.log")"; fi
        sleep 0.2
    done
}

# ---- Ray: who has the token may run any code here --------------------------------------------------------------
token=RAY_AUTH_TOKEN
if [ -z "${RAY_AUTH_TOKEN:-}" ]; then
    token=$token_file
    mkdir -p "$(dirname "$token_file")"
    [ -s "$token_file" ] || (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$token_file")
    chmod 600 "$token_file"
fi
export RAY_AUTH_MODE=token RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
export RAY_PROMETHEUS_HOST=http://127.0.0.1:$prometheus_port RAY_GRAFANA_HOST=http://127.0.0.1:$grafana_port
! is_up ray || echo "it is up already"
start ray "$dashboard_port" env -u RAY_ADDRESS "$bin/ray" start --head --block --disable-usage-stats \
    --num-cpus="$cpus" --port="$ray_port" --dashboard-host=127.0.0.1 --dashboard-port="$dashboard_port" \
    --dashboard-agent-listen-port=0

# ---- Prometheus: rules and alerts of deploy/prometheus, and every run that says in `runs` where it is ---------------
if command -v prometheus >/dev/null; then
    cat >"$up/prometheus.yml" <<YAML
global: {scrape_interval: 5s, evaluation_interval: 15s}
rule_files: ["$root/deploy/prometheus/recording.yml", "$root/deploy/prometheus/alerts.yml"]
scrape_configs:
  - job_name: headway-runs
    file_sd_configs: [{files: ["$runs/*.targets.json"]}]
  - job_name: ray
    file_sd_configs: [{files: ["$ray_temp/prom_metrics_service_discovery.json"]}]
    metric_relabel_configs: [{regex: "otel_scope_.*", action: labeldrop}]
YAML
    start prometheus "$prometheus_port" prometheus --config.file="$up/prometheus.yml" \
        --storage.tsdb.path="$up/prometheus" --web.listen-address="127.0.0.1:$prometheus_port"
    wait_for prometheus answers "$prometheus_port"
    prometheus=http://127.0.0.1:$prometheus_port
else
    prometheus="not installed: apt-get install --no-install-recommends prometheus, then again"
fi

# ---- Grafana, with the dashboard of deploy/grafana -----------------------------------------------------------------
if command -v grafana >/dev/null; then
    mkdir -p "$up/grafana/provisioning/datasources" "$up/grafana/provisioning/dashboards"
    cat >"$up/grafana/provisioning/datasources/headway.yml" <<YAML
{apiVersion: 1, datasources: [{name: Prometheus, type: prometheus, url: "$prometheus", isDefault: true}]}
YAML
    cat >"$up/grafana/provisioning/dashboards/headway.yml" <<YAML
{apiVersion: 1, providers: [{name: headway, type: file, options: {path: "$root/deploy/grafana"}}]}
YAML
    start grafana "$grafana_port" env GF_SERVER_HTTP_ADDR=127.0.0.1 GF_SERVER_HTTP_PORT="$grafana_port" \
        GF_PATHS_DATA="$up/grafana" GF_PATHS_LOGS="$up/grafana" GF_PATHS_PROVISIONING="$up/grafana/provisioning" \
        GF_AUTH_ANONYMOUS_ENABLED=true grafana server --homepath="${UP_GRAFANA_HOME:-/usr/share/grafana}"
    wait_for grafana answers "$grafana_port"
    grafana=http://127.0.0.1:$grafana_port/d/headway
else
    grafana="not installed: any Grafana shows deploy/grafana/headway.json"
fi

wait_for ray grep -q "Ray runtime started" "$up/ray.log"
cat <<TEXT
Ray         http://127.0.0.1:$dashboard_port   its token is in $token
Prometheus  $prometheus
Grafana     $grafana

next:
  headway submit configs/demo.yaml --address http://127.0.0.1:$dashboard_port run.name=first
  headway top                        in another terminal; also: status, scale generation=2, stop
  headway rollouts runs/first --best 3 --worst 3
  make down
TEXT
