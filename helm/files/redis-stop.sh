#!/bin/sh
# Hands over before the server is stopped, so that clients wait for a second and not until it is missed.
set -u
. /etc/orca/redis/primary.sh

replication() { timeout 2 $CLI info replication | tr -d '\r'; }
replication | grep -qx 'role:master' || exit 0

# What is written from now on could be lost: it waits for the next primary.
timeout 2 $CLI client pause 30000 write
for _ in 1 2 3 4 5 6 7 8 9 10; do
  at=$(replication | sed -n 's/^master_repl_offset://p')
  replication | grep '^slave[0-9]' | grep -qv ",offset=$at," || break
  sleep 0.2
done
for sentinel in $SENTINELS; do
  [ "$(timeout 2 $CLI -h "$sentinel" -p 26379 sentinel failover orca)" != OK ] || break
done
for _ in 1 2 3 4 5 6 7 8 9 10; do
  [ "$(named)" = "$HOST" ] || exit 0
  sleep 1
done
