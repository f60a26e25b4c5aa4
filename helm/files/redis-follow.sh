#!/bin/sh
# Has a replica follow the primary, as long as its server runs. Sentinels do that for the replicas that they know, and learn of
# a new one within 10 s. One whose primary died before that would follow the old one for ever, and not become the primary.
set -u
. /etc/orca/redis/primary.sh

wrong=''
while sleep "${1:-5}"; do
  of=$(timeout 2 $CLI info replication | tr -d '\r' | sed -n 's/^master_host://p')
  [ -n "$of" ] || continue # it is the primary
  primary=$(named)
  case "$primary" in
    '' | "$of" | "$HOST") wrong='' ;;
    "$wrong")
      echo "$HOST follows $of, and the primary is $primary"
      timeout 2 $CLI replicaof "$primary" 6379
      wrong=''
      ;;
    *) wrong=$primary ;; # a failover may be on: the Sentinels tell a replica before they name the primary
  esac
done
