#!/bin/sh
# Starts a server, as the primary or as a replica of the one that the Sentinels name: redis-start.sh SERVER OPTIONS...
set -eu
. /etc/orca/redis/primary.sh

# Whether a server runs that has followed this one, and so has all that clients have seen.
followed() {
  for other in $SERVERS; do
    if [ "$other" != "$HOST" ] && timeout 2 $CLI -h "$other" info replication 2>/dev/null |
      grep -q '^master_link_down_since_seconds:[0-9]'; then return 0; fi
  done
  return 1
}

waited=0
while true; do
  primary=$(named)
  if [ -z "$primary" ]; then
    why='no two Sentinels name the same primary'
  elif [ "$primary" != "$HOST" ]; then
    exec "$@" --replicaof "$primary" 6379
  elif [ "$waited" -lt 30 ] && followed; then
    # The Sentinels may be making it the primary at this moment: with two of them, one would lose what it wrote.
    why='a replica is to become the primary'
  elif [ -e /data/appendonlydir ] || [ -e /data/appendonly.aof ] || [ -z "$(ask sentinel replicas orca)" ]; then
    exec "$@"
  else
    why='it is named as the primary and its disk is empty, but there were replicas: delete the claims of the Sentinels to begin anew'
  fi
  [ $((waited % 10)) -ne 0 ] || echo "$HOST waits: $why"
  waited=$((waited + 1))
  sleep 1
done
