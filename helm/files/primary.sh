# For the scripts beside it. CLI: the client, with certificates. SENTINELS, SERVERS: hosts. HOST: the name of this server.

# Prints what each Sentinel answers: ask COMMAND...
ask() {
  for sentinel in $SENTINELS; do timeout 2 $CLI -h "$sentinel" -p 26379 "$@" 2>/dev/null || true; done
}

# Prints the host of the primary that at least two Sentinels name.
named() {
  ask sentinel get-master-addr-by-name orca | grep -E '^[a-z][a-z0-9-]*$' | sort | uniq -d
}
