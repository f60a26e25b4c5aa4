# For the scripts beside it. CLI: the client, with certificates. SENTINELS, SERVERS: hosts. HOST: the name of this server.

# Prints what each Sentinel answers: ask COMMAND...
ask() {
  for sentinel in $SENTINELS; do timeout 2 $CLI -h "$sentinel" -p 26379 "$@" 2>/dev/null || true; done
}

# Prints the host of the primary that at least two Sentinels name.
named() {
  ask sentinel get-master-addr-by-name orca | grep -E '^[a-z][a-z0-9-]*$' | sort | uniq -d
}

# How many of its replicas have what a primary has: following TEXT, its `info replication`. What that says of a replica is up to a
# second old, and behind a question for it (WAITAOF) always: one that seems to lack something is asked itself. 0: all. 1: some. 2: none,
# or one does not answer.
following() {
  at=${1#*master_repl_offset:}
  at=${at%%[!0-9]*}
  all=0 some=2
  for word in $1; do
    case "$word" in
      slave[0-9]*:*",state=online,offset=$at,"*) some=1 ;;
      slave[0-9]*:ip=*,port=*,state=online,*)
        host=${word#*:ip=}
        port=${host#*,port=}
        has=$(timeout 0.3 $CLI -h "${host%%,*}" -p "${port%%,*}" info replication)
        [ $? -lt 124 ] || return 2 # it was late: 124, or the signal's 143 where busybox has the timeout
        has=${has#*slave_repl_offset:}
        has=${has%%[!0-9]*}
        if [ "${has:-0}" -ge "$at" ]; then some=1; else all=1; fi
        ;;
    esac
  done
  [ "$some$all" = 10 ] || return "$some"
}
