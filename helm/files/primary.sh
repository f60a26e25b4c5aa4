# For the scripts beside it. CLI: the client, with certificates. SENTINELS, SERVERS: hosts. HOST: the name of this server.

# Prints what each Sentinel answers: ask COMMAND...
ask() {
  for sentinel in $SENTINELS; do timeout 2 $CLI -h "$sentinel" -p 26379 "$@" 2>/dev/null || true; done
}

# Prints the host of the primary that at least two Sentinels name.
named() {
  ask sentinel get-master-addr-by-name orca | grep -E '^[a-z][a-z0-9-]*$' | sort | uniq -d
}

# Whether a replica lacks what its primary has: lacking TEXT, the primary's `info replication`.
lacking() {
  at=${1#*master_repl_offset:}
  at=${at%%[!0-9]*}
  for word in $1; do
    case "$word" in
      slave[0-9]*:*",offset=$at,"*) ;;
      slave[0-9]*:ip=*) return 0 ;;
    esac
  done
  return 1
}
