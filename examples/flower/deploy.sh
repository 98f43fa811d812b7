#!/usr/bin/env bash
# Deploy the app beside this script on this machine: a SuperLink with TLS, three SuperNodes with a key each, one run.
# The script stops every process that it starts. Started again with the same folder, it resumes the run.
#   ./deploy.sh FOLDER [SETTINGS.toml]     FOLDER is the run folder
#   PORT=18000                             first of four ports
#   BIND=127.0.0.1                         address; loopback only: a program that reaches the port controls the SuperLink
set -euo pipefail
set -m # a process group per job: Ctrl-C reaches this script alone, which stops the others in order

app=$(cd "$(dirname "$0")" && pwd)
nodes=3
port=${PORT:-18000}
bind=${BIND:-127.0.0.1}
fail() { echo "deploy.sh: $*" >&2 && exit 2; }
unboxed() { sed -n 's/^│ *\(.*[^ ]\) *│$/\1/p' "$1" | tr '\n' ' '; } # flwr's message without its frame
[ $# -ge 1 ] || fail "missing folder; use ./deploy.sh FOLDER [SETTINGS.toml]"
# Flower's Control API shares this port with the nodes and has no accounts: a client that reaches it can run code here.
[[ $bind =~ ^127\.[0-9]+\.[0-9]+\.[0-9]+$ ]] ||
    fail "BIND must be a loopback address such as 127.0.0.1: got $bind; reach other machines through SSH tunnels"
settings=$(realpath "${2:-$app/settings.toml}")
[ -f "$settings" ] || fail "$settings does not exist"
for program in openssl ssh-keygen flower-superlink flower-supernode flwr; do
    command -v $program >/dev/null || fail "$program is not installed; Flower's programs: pip install 'stableair[flower]'"
done
for i in $(seq 0 $nodes); do
    (: <"/dev/tcp/$bind/$((port + i))") 2>/dev/null && fail "port $((port + i)) is in use; set PORT to another first port"
done
python - "$settings" "$nodes" <<'PYTHON' || exit 2
import sys, tomllib
from stableair.flower.app import experiment_from_config
try:
    settings = tomllib.load(open(sys.argv[1], "rb"))
    experiment_from_config(settings)
    if settings.get("clients", int(sys.argv[2])) != int(sys.argv[2]):
        raise ValueError(f"clients is {settings['clients']}, but this script starts {sys.argv[2]} nodes; remove it")
except ValueError as error:
    sys.exit(f"deploy.sh: {sys.argv[1]}: {error}")
PYTHON
mkdir -p "$1" && folder=$(realpath "$1")
state=$folder/flower # keys, certificates, database and logs
mkdir -p "$state" && chmod 700 "$state" && cd "$state"

export FLWR_HOME=$state/home FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 OMP_NUM_THREADS=1
export DEPLOYMENT=$$.$RANDOM # marks our processes: Flower starts new sessions, so a process group is not enough
processes() { # our processes whose names start with $1
    grep -lszxF "DEPLOYMENT=$DEPLOYMENT" /proc/[0-9]*/environ | cut -d/ -f3 | while read -r process; do
        [[ $(cat "/proc/$process/comm" 2>/dev/null) != "$1"* ]] || echo "$process"
    done
}
stop() {
    for signal in "${2:-TERM}" KILL; do
        kill -$signal $(processes "$1") 2>/dev/null || true
        for _ in $(seq 100); do
            kill -0 $(processes "$1") 2>/dev/null || return 0 # only the grep is left
            sleep 0.1
        done
    done
}
loops=() # they restart the nodes
finish() {
    trap '' INT TERM
    disown -a
    stop flwr KILL # the run first: otherwise it would record a round without nodes
    kill "${loops[@]}" 2>/dev/null || true
    stop flower-supern # then the nodes: they sign off, so that the SuperLink accepts them again at once
    stop ""
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# A certificate authority, the SuperLink's certificate, and one key per node.
ec="ec -pkeyopt ec_paramgen_curve:P-384"
if [ ! -f ca.crt ]; then
    openssl req -x509 -newkey $ec -nodes -days 365 -subj "/CN=stableair" -keyout ca.key -out ca.crt 2>/dev/null
fi
if [ ! -f server.pem ]; then
    printf 'subjectAltName=DNS:localhost,IP:%s\nbasicConstraints=CA:FALSE\n' "$bind" >server.ext
    openssl req -newkey $ec -nodes -subj "/CN=localhost" -keyout server.key -out server.csr 2>/dev/null
    openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext \
        -out server.pem 2>/dev/null
fi
openssl verify -CAfile ca.crt -verify_ip "$bind" server.pem >/dev/null 2>&1 ||
    fail "$state/server.pem is not a certificate for $bind signed by ca.crt; remove it"
for i in $(seq 0 $((nodes - 1))); do
    [ -f node$i ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f node$i
done

flower-superlink --host "$bind" --port "$port" --database state.db --disable-runtime-dependency-installation \
    --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key --enable-supernode-auth \
    >>superlink.log 2>&1 &
superlink=$! && disown
for _ in $(seq 600); do # it listens within seconds
    (: <"/dev/tcp/$bind/$port") 2>/dev/null && break
    kill -0 $superlink 2>/dev/null || fail "the SuperLink did not start: $(tail -n 1 superlink.log)"
    sleep 0.1
done
mkdir -p "$FLWR_HOME"
printf '[superlink.air]\naddress = "%s:%s"\nroot-certificates = "%s/ca.crt"\n' "$bind" "$port" "$PWD" >"$FLWR_HOME/config.toml"
# After a SuperLink was killed, its database lists its nodes as online for up to a minute, and it refuses them meanwhile.
while flwr supernode list air --format json 2>/dev/null | grep -q '"online"'; do sleep 1; done

for i in $(seq 0 $((nodes - 1))); do
    if [ ! -f node$i.registered ]; then
        flwr supernode register node$i.pub air >register.log 2>&1 || fail "node $i: $(unboxed register.log)"
        touch node$i.registered
    fi
    # Restart a node that exits, after the minute that the SuperLink takes to mark it as offline. Before that, the node
    # would be refused, or accepted without the round's message, and the round would wait for it until its timeout.
    (while true; do
        flower-supernode --superlink "$bind:$port" --root-certificates ca.crt \
            --auth-supernode-private-key node$i --node-config "partition-id=$i" \
            --host "$bind" --port $((port + 1 + i)) >>node$i.log 2>&1 || true
        sleep 60
    done) &
    loops+=($!) && disown
done

# With spaces around an equals sign, --run-config "key = value" silently drops the setting; a file has no such problem.
{ cat "$settings" && printf '\nfolder = "%s"\n' "$folder"; } >run.toml
flwr run "$app" air --run-config run.toml --stream </dev/null &
wait $! || true # signals interrupt it; it fails when the SuperLink fails, but not when the run fails
status=$(flwr list air --limit 1 --format json 2>/dev/null | sed -n 's/^ *"status": "\(.*\)",$/\1/p') || true
[ "$status" = finished:completed ] || fail "the run is not complete (${status:-its SuperLink is gone}); the same command resumes it"
