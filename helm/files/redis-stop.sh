#!/bin/sh
# Hands over before the server is stopped, so that clients wait for a second and not until it is missed. A pod that is deleted
# without grace has one second for it, so it starts few processes.
set -u
. /etc/orca/redis/primary.sh

case "$(timeout 2 $CLI info replication)" in *role:master*) ;; *) exit 0 ;; esac

# What is written from now on could be lost: it waits for the next primary.
for _ in 1 2 3 4 5 6 7 8 9 10; do
  lacking "$(printf 'client pause 30000 write\ninfo replication\n' | timeout 2 $CLI)" || break
  sleep 0.2
done
for sentinel in $SENTINELS; do
  [ "$(timeout 2 $CLI -h "$sentinel" -p 26379 sentinel failover orca)" != OK ] || break
done
for _ in 1 2 3 4 5 6 7 8 9 10; do
  [ "$(named)" = "$HOST" ] || exit 0
  sleep 1
done
