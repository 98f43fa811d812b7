#!/usr/bin/env bash
# A deployment on this machine alone: a SuperLink with TLS, three SuperNodes with a key each, and a run of the app beside
# this script. Whatever it starts it ends. Started again with the same folder it goes on where the last run ended.
#   ./deploy.sh FOLDER [SETTINGS.toml]     FOLDER is the run's; PORT=18000 is the first of four ports
set -euo pipefail
set -m # a process group for each job: Ctrl-C reaches this script alone, which ends the others in order

app=$(cd "$(dirname "$0")" && pwd)
nodes=3
port=${PORT:-18000}
fail() { echo "deploy.sh: $*" >&2 && exit 2; }
boxed() { sed -n 's/^│ *\(.*[^ ]\) *│$/\1/p' "$1" | tr '\n' ' '; } # what flwr says, without the box that it draws round it
[ $# -ge 1 ] || fail "which folder? ./deploy.sh FOLDER [SETTINGS.toml]"
settings=$(realpath "${2:-$app/settings.toml}")
[ -f "$settings" ] || fail "$settings is not there"
for program in openssl ssh-keygen flower-superlink flower-supernode flwr; do
    command -v $program >/dev/null || fail "$program is not there; for Flower's: pip install 'stableair[flower]'"
done
for i in $(seq 0 $nodes); do
    (: </dev/tcp/127.0.0.1/$((port + i))) 2>/dev/null && fail "port $((port + i)) is in use; PORT=... takes others"
done
python - "$settings" "$nodes" <<'PYTHON' || exit 2
import sys, tomllib
from stableair.flower.app import experiment_of
try:
    settings = tomllib.load(open(sys.argv[1], "rb"))
    experiment_of(settings)
    if settings.get("clients", int(sys.argv[2])) != int(sys.argv[2]):
        raise ValueError(f"clients is {settings['clients']}, and this starts {sys.argv[2]} nodes; leave it out")
except ValueError as error:  # what is wrong is one line
    sys.exit(f"deploy.sh: {sys.argv[1]}: {error}")
PYTHON
mkdir -p "$1" && folder=$(realpath "$1")
state=$folder/flower # keys, certificates, database and logs
mkdir -p "$state" && chmod 700 "$state" && cd "$state"

export FLWR_HOME=$state/home FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1
export FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 OMP_NUM_THREADS=1
export DEPLOYMENT=$$.$RANDOM # in the environment of whatever is ours: Flower starts sessions of its own, too
ours() { # those whose names begin so
    grep -lszxF "DEPLOYMENT=$DEPLOYMENT" /proc/[0-9]*/environ | cut -d/ -f3 | while read -r process; do
        [[ $(cat "/proc/$process/comm" 2>/dev/null) != "$1"* ]] || echo "$process"
    done
}
end() {
    for signal in "${2:-TERM}" KILL; do
        kill -$signal $(ours "$1") 2>/dev/null || true
        for _ in $(seq 100); do
            kill -0 $(ours "$1") 2>/dev/null || return 0 # nobody is left but the grep that looked
            sleep 0.1
        done
    done
}
loops=() # which start the nodes again
finish() {
    trap '' INT TERM
    disown -a
    end flwr KILL # the run first: else it would record a round in which all of its nodes went
    kill "${loops[@]}" 2>/dev/null || true
    end flower-supern # then the nodes, which take leave of the SuperLink and so can come back to it at once
    end ""
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# An authority of our own, a certificate of the SuperLink by it, and a key for each node.
ec="ec -pkeyopt ec_paramgen_curve:P-384"
if [ ! -f ca.crt ]; then
    openssl req -x509 -newkey $ec -nodes -days 365 -subj "/CN=stableair" -keyout ca.key -out ca.crt 2>/dev/null
fi
if [ ! -f server.pem ]; then
    printf 'subjectAltName=DNS:localhost,IP:127.0.0.1\nbasicConstraints=CA:FALSE\n' >server.ext
    openssl req -newkey $ec -nodes -subj "/CN=localhost" -keyout server.key -out server.csr 2>/dev/null
    openssl x509 -req -in server.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -extfile server.ext \
        -out server.pem 2>/dev/null
fi
openssl verify -CAfile ca.crt server.pem >/dev/null 2>&1 || fail "$state/server.pem is not a certificate by ca.crt there"
for i in $(seq 0 $((nodes - 1))); do
    [ -f node$i ] || ssh-keygen -q -t ecdsa -b 384 -N "" -C "" -f node$i
done

flower-superlink --host 127.0.0.1 --port "$port" --database state.db --disable-runtime-dependency-installation \
    --ssl-ca-certfile ca.crt --ssl-certfile server.pem --ssl-keyfile server.key --enable-supernode-auth \
    >>superlink.log 2>&1 &
superlink=$! && disown
for _ in $(seq 600); do # it listens within seconds
    (: </dev/tcp/127.0.0.1/$port) 2>/dev/null && break
    kill -0 $superlink 2>/dev/null || fail "the SuperLink did not start: $(tail -n 1 superlink.log)"
    sleep 0.1
done
mkdir -p "$FLWR_HOME"
printf '[superlink.air]\naddress = "127.0.0.1:%s"\nroot-certificates = "%s/ca.crt"\n' "$port" "$PWD" >"$FLWR_HOME/config.toml"
# A SuperLink that was killed counts on its nodes for up to a minute, and refuses them while it does.
while flwr supernode list air --format json 2>/dev/null | grep -q '"online"'; do sleep 1; done

for i in $(seq 0 $((nodes - 1))); do
    if [ ! -f node$i.registered ]; then
        flwr supernode register node$i.pub air >register.log 2>&1 || fail "node $i: $(boxed register.log)"
        touch node$i.registered
    fi
    # A node that dies is started again, after a minute: so long it takes the SuperLink to give it up. Before that it would
    # be refused, or be taken back without the round's message, for which the round would then wait in vain.
    (while true; do
        flower-supernode --superlink "127.0.0.1:$port" --root-certificates ca.crt \
            --auth-supernode-private-key node$i --node-config "partition-id=$i" \
            --host 127.0.0.1 --port $((port + 1 + i)) >>node$i.log 2>&1 || true
        sleep 60
    done) &
    loops+=($!) && disown
done

# Spaces round an equals sign in --run-config would drop a setting in silence, so the settings go in as a file.
{ cat "$settings" && printf '\nfolder = "%s"\n' "$folder"; } >run.toml
flwr run "$app" air --run-config run.toml --stream </dev/null &
wait $! || true # and be interrupted; it fails when the SuperLink does, and not when the run does
status=$(flwr list air --limit 1 --format json 2>/dev/null | sed -n 's/^ *"status": "\(.*\)",$/\1/p') || true
[ "$status" = finished:completed ] || fail "the run is not complete (${status:-its SuperLink is gone}); this command goes on with it"
