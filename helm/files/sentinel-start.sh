#!/bin/sh
# Starts a Sentinel. Its file keeps what it has learnt; all else is written anew at each start: sentinel-start.sh SERVER
set -eu
umask 077
file=/data/sentinel.conf
# A volume that was given again may have the file of another release with the same names. Its Sentinels would count as voters for
# ever: of four, two are no majority, and a failover waited 12 s for the next election.
[ "$(cat /data/release 2>/dev/null || echo "$RELEASE")" = "$RELEASE" ] || rm -f "$file"
echo "$RELEASE" >/data/release
number=${HOST##*-}
# 0, 200 and 600 milliseconds: Sentinels that miss the primary at once all vote for themselves, and elect none. When the third
# one misses it, the second has its votes: each looks ten times a second.
late=$((number * (number + 1) * 100))
learnt='^sentinel (myid|monitor|current-epoch|config-epoch|leader-epoch|known-replica|known-sentinel) '
case "${REDISCLI_AUTH:-}" in
  *[!A-Za-z0-9!$%\&*+,./:\;=?@^_~-]*) echo 'password: a Sentinel cannot keep one with spaces, quotes, backslashes or #'; exit 1 ;;
esac
primary=$(sed -n 's/^sentinel monitor orca \([^ ]*\) .*/\1/p' "$file" 2>/dev/null || true)
case " $SERVERS " in
  *" ${primary:-none} "*) ;;
  *) rm -f "$file" ;; # a volume that another release had
esac
{
  grep -E "$learnt" "$file" 2>/dev/null || echo "sentinel monitor orca ${SERVERS%% *} 6379 2"
  awk -v late="$late" '/^sentinel down-after-milliseconds / { $NF += late } { print }' /etc/orca/redis/sentinel.conf
  if [ -n "${REDISCLI_AUTH:-}" ]; then
    printf 'requirepass %s\nsentinel sentinel-pass %s\n' "$REDISCLI_AUTH" "$REDISCLI_AUTH"
    printf 'sentinel auth-user orca default\nsentinel auth-pass orca %s\n' "$REDISCLI_AUTH"
  fi
} >"$file.new"
mv "$file.new" "$file"
exec "$1" "$file" --sentinel
