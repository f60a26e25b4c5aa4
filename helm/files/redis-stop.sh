#!/bin/sh
# Hands over before the server is stopped, so that clients wait for a second and not until it is missed. A pod that is deleted without
# grace has a second for all, and often less: its network policies may end before it does, and then no new connection is answered.
set -u
. /etc/orca/redis/primary.sh

case "$(timeout 2 $CLI info replication)" in *role:master*) ;; *) exit 0 ;; esac

# Says it in the server's log.
say() {
  echo "$HOST $*" >/proc/1/fd/1
}

# Prints the replicas that run and do not follow yet. In a rolling restart the primary's pod is deleted as soon as the pod before it
# answers. The next primary could then have no replica, and clients are shown nothing that no replica has.
coming() {
  for other in $SERVERS; do
    [ "$other" != "$HOST" ] || continue
    case "$(timeout 1 $CLI -h "$other" info replication 2>/dev/null)" in
      *role:slave*master_link_status:down*) echo "$other" ;;
    esac
  done
}

# Stops writes, which could be lost from now on. Whether the replicas have all that was written; after a moment one of them suffices,
# since Sentinel takes the one that has most.
caught_up() {
  for _ in 1 2 3; do
    following "$(printf 'client pause 30000 write\ninfo replication\n' | timeout 2 $CLI)"
    case $? in
      0) return 0 ;;
      2) return 1 ;;
    esac
    sleep 0.1
  done
}

# Has a Sentinel make a replica the primary: hand_over HOST. Fails when it surely does not. The connection is there before writes
# stop, so that they do not wait for it.
hand_over() {
  rm -f /tmp/said /tmp/asked
  {
    echo ping
    for _ in 1 2 3 4 5 6 7 8 9 10; do
      ! grep -qs PONG /tmp/said || break
      sleep 0.05
    done
    grep -qs PONG /tmp/said && caught_up && : >/tmp/asked && echo sentinel failover orca
  } | timeout 10 $CLI -h "$1" -p 26379 >/tmp/said
  [ -e /tmp/asked ] && ! grep -q -e ERR -e NOGOODSLAVE /tmp/said
}

said='' until=$(($(date +%s) + 10))
while late=$(coming) && [ -n "$late" ] && [ "$(date +%s)" -lt "$until" ]; do
  [ "$said" = "$late" ] || say "waits for" $late
  said=$late
  sleep 0.5
done

for sentinel in $SENTINELS $SENTINELS; do
  if hand_over "$sentinel"; then
    say "hands over by $sentinel"
    for _ in 1 2 3 4 5 6 7 8 9 10; do
      [ "$(named)" = "$HOST" ] || exit 0
      sleep 1
    done
    exit 0
  fi
  timeout 2 $CLI client unpause
  say "could not hand over by $sentinel"
done
