#!/bin/sh
# Starts a server, as the primary or as a replica of the one that the Sentinels name: redis-start.sh SERVER OPTIONS...
set -eu
. /etc/orca/redis/primary.sh

# Whether another server runs that has what clients have seen: it was made the primary, or it has followed one. A replica
# that was just started has not; its link has been down for -1 seconds.
followed() {
  for other in $SERVERS; do
    [ "$other" != "$HOST" ] || continue
    role=$(timeout 2 $CLI -h "$other" info replication 2>/dev/null | tr -d '\r') || continue
    case "$role" in
      *role:*master_link_down_since_seconds:-1*) ;;
      *role:*) return 0 ;;
    esac
  done
  return 1
}

# Becomes the server. It may be a replica later, whatever it is now.
serve() {
  sh /etc/orca/redis/redis-follow.sh &
  exec "$@"
}

waited=0
while true; do
  primary=$(named)
  if [ -z "$primary" ]; then
    why='no two Sentinels name the same primary'
  elif [ "$primary" != "$HOST" ]; then
    serve "$@" --replicaof "$primary" 6379
  elif [ "$waited" -lt 30 ] && followed; then
    # The Sentinels may be making it the primary at this moment: with two of them, one would lose what it wrote.
    why='a replica is to become the primary'
  elif [ -e /data/appendonlydir ] || [ -e /data/appendonly.aof ] || [ -z "$(ask sentinel replicas orca)" ]; then
    serve "$@"
  else
    why='it is named as the primary and its disk is empty, but there were replicas: delete the claims of the Sentinels to begin anew'
  fi
  [ $((waited % 10)) -ne 0 ] || echo "$HOST waits: $why"
  waited=$((waited + 1))
  sleep 1
done
