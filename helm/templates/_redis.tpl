{{/* The request pool: the release's own Redis, alone or with replicas and Sentinels, or one of somebody else. */}}

{{- define "orca.installsRedis" -}}
{{- if not (or .Values.redis.externalUrl .Values.redis.externalUrlSecret) }}yes{{ end -}}
{{- end -}}

{{- define "orca.sentinels" -}}
{{- if eq .Values.redis.mode "sentinel" }}yes{{ end -}}
{{- end -}}

{{/* How many servers there are. */}}
{{- define "orca.redisServers" -}}
{{ include "orca.sentinels" . | empty | ternary 1 (add 1 .Values.redis.replicas) }}
{{- end -}}

{{/*
Names of the servers and the Sentinels in DNS. Each server has a Service of its own: an address that stays, and refuses at once
while the pod is away. The first one is the first primary. The names are short, so that a resolver finds them in the namespace,
where it looks first: a Sentinel does nothing while it waits, and with `.NAMESPACE.svc` it asked three times.
*/}}
{{- define "orca.redisHosts" -}}
{{- $hosts := list -}}
{{- range until (include "orca.redisServers" . | int) -}}
{{- $hosts = append $hosts (printf "%s-%d" (include "orca.name" (list $ "redis")) .) -}}
{{- end -}}
{{ join " " $hosts }}
{{- end -}}

{{- define "orca.sentinelHosts" -}}
{{- $name := include "orca.name" (list . "sentinel") -}}
{{- $hosts := list -}}
{{- range until 3 }}{{ $hosts = append $hosts (printf "%s-%d.%s" $name . $name) }}{{ end -}}
{{ join " " $hosts }}
{{- end -}}

{{/* The ports of the pool, with spaces between: those of the URL, and where Sentinels name the primary, its own. */}}
{{- define "orca.redisPorts" -}}
{{- $redis := .Values.redis -}}
{{- $sentinels := contains "+sentinel:" $redis.externalUrl -}}
{{- $ports := list -}}
{{- if $redis.externalUrl -}}
{{- range regexFind "//[^/?]+" $redis.externalUrl | trimPrefix "//" | splitList "@" | last | splitList "," -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" . | trimPrefix ":" | default ($sentinels | ternary "26379" "6379")) -}}
{{- end -}}
{{- end -}}
{{- if or $sentinels $redis.externalUrlSecret }}{{ $ports = append $ports (include "orca.text" $redis.externalPort) }}{{ end -}}
{{ $ports | default (list "6379") | uniq | join " " }}
{{- end -}}

{{/* Where the password is, as {name: SECRET, key: KEY}; nothing without one. */}}
{{- define "orca.redisPassword" -}}
{{- $password := .Values.redis.password -}}
{{- with $password.secret -}}
{{ dict "name" .name "key" .key | toJson }}
{{- else -}}
{{- if $password.generate }}{{ dict "name" (include "orca.name" (list . "redis")) "key" "password" | toJson }}{{ end -}}
{{- end -}}
{{- end -}}

{{/* The pool's settings: (list $ "endpoint" or "scheduler"). */}}
{{- define "orca.poolEnvironment" -}}
{{- $root := first . -}}
{{- $redis := $root.Values.redis -}}
{{- $scheme := include "orca.tls" $root | empty | ternary "redis" "rediss" -}}
- name: ORCA_REDIS_URL
  {{- if $redis.externalUrlSecret }}
  valueFrom:
    secretKeyRef: {{ dict "name" $redis.externalUrlSecret.name "key" $redis.externalUrlSecret.key | toJson }}
  {{- else if include "orca.sentinels" $root }}
  value: {{ $scheme }}+sentinel://{{ include "orca.sentinelHosts" $root | replace " " "," }}/orca/0
  {{- else }}
  value: {{ $redis.externalUrl | default (printf "%s://%s:6379/0" $scheme (include "orca.name" (list $root "redis"))) | quote }}
  {{- end }}
{{- with include "orca.redisPassword" $root }}
- name: ORCA_REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {{ . }}
{{- end }}
{{- if and (include "orca.sentinels" $root) (not (hasKey (index $root.Values (last .)).settings "redis_replicas")) }}
- name: ORCA_REDIS_REPLICAS  # a failover loses nothing that a client has seen
  value: "1"
{{- end }}
- name: ORCA_POOL  # two releases on one Redis never share a pool
  value: {{ printf "%s.%s" $root.Release.Namespace $root.Release.Name | quote }}
{{- end -}}

{{/* -- Its own servers and Sentinels -- */}}

{{/* A program of the image: (list $ "server" or "cli"). */}}
{{- define "orca.redisProgram" -}}
{{ (first .).Values.redis.program }}-{{ last . }}
{{- end -}}

{{- define "orca.redisCli" -}}
{{- $files := "/etc/orca/tls" -}}
{{ include "orca.redisProgram" (list . "cli") }}
{{- if include "orca.tls" . }} --tls --cacert {{ $files }}/ca.crt --cert {{ $files }}/tls.crt --key {{ $files }}/tls.key{{ end -}}
{{- end -}}

{{/* The settings of TLS, as pairs in a list: (list $ PORT). There is no plaintext port then. */}}
{{- define "orca.redisTls" -}}
{{- $files := "/etc/orca/tls" -}}
{{- $settings := list -}}
{{- if include "orca.tls" (first .) -}}
{{- $settings = list "port" "0" "tls-port" (last .) "tls-replication" "yes" "tls-auth-clients" "yes" -}}
{{- $settings = concat $settings (list "tls-cert-file" (printf "%s/tls.crt" $files) "tls-key-file" (printf "%s/tls.key" $files) "tls-ca-cert-file" (printf "%s/ca.crt" $files)) -}}
{{- end -}}
{{ toJson $settings }}
{{- end -}}

{{/*
What Redis has acknowledged is on disk, and nothing is evicted: the pool's promises rest on both. A server that could not hand over
stops at once: it would hold up writes until its replicas have all, for up to ten seconds, in which it is not missed.
*/}}
{{- define "orca.redisCommand" -}}
{{- $command := list (include "orca.redisProgram" (list . "server")) -}}
{{- $settings := list "dir" "/data" "appendonly" "yes" "appendfsync" "always" "save" "" "maxmemory-policy" "noeviction" "protected-mode" "no" -}}
{{- $settings = concat $settings (include "orca.redisTls" (list . "6379") | fromJsonArray) -}}
{{- if include "orca.redisPassword" . -}}
{{- $settings = concat $settings (list "requirepass" "$(REDISCLI_AUTH)" "masteruser" "default" "masterauth" "$(REDISCLI_AUTH)") -}}
{{- end -}}
{{- if include "orca.sentinels" . -}}
{{- $command = concat (list "sh" "/etc/orca/redis/redis-start.sh") $command -}}
{{- $settings = concat $settings (list "replica-announce-ip" "$(HOST)" "repl-diskless-sync-delay" "0" "shutdown-timeout" "0") -}}
{{- end -}}
{{- range $n, $word := $settings -}}
{{- $command = append $command (mod $n 2 | eq 1 | ternary $word (printf "--%s" $word)) -}}
{{- end -}}
{{ toYaml $command }}
{{- end -}}

{{/* The arguments of redis-cli and the scripts: (list $ "redis" or "sentinel"). */}}
{{- define "orca.redisEnvironment" -}}
{{- $root := first . -}}
{{- with include "orca.redisPassword" $root }}
- name: REDISCLI_AUTH
  valueFrom:
    secretKeyRef: {{ . }}
{{- end }}
{{- if include "orca.sentinels" $root }}
- name: HOST
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: RELEASE
  value: {{ printf "%s.%s" $root.Release.Namespace $root.Release.Name | quote }}
- name: SERVERS
  value: {{ include "orca.redisHosts" $root }}
- name: SENTINELS
  value: {{ include "orca.sentinelHosts" $root }}
- name: CLI
  value: {{ include "orca.redisCli" $root }}
{{- end }}
{{- include "orca.podEnvironment" . }}
{{- end -}}

{{/*
Probes of a server, or of a Sentinel: (list $ PORT). It answers PONG once it has read its file, which a startup waits for up to
ten minutes. All streams wait for the first PONG, so it is asked for each second; what is ready stays so for 30 s without an
answer, as on a slow disk.
*/}}
{{- define "orca.redisProbes" -}}
{{- $ping := dict "command" (list "sh" "-c" (printf "test \"$(%s -p %s ping)\" = PONG" (include "orca.redisCli" (first .)) (last .))) -}}
startupProbe:
  exec: {{ toJson $ping }}
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 600
readinessProbe:
  exec: {{ toJson $ping }}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 15
livenessProbe:
  tcpSocket: {port: redis}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end -}}

{{/* Redis's own metrics, by redis_exporter. It asks the server beside it, whose certificate is not for localhost. */}}
{{- define "orca.redisExporter" -}}
{{- with .Values.redis.exporter }}
{{- if .enabled }}
- name: exporter
  image: {{ .image | quote }}
  imagePullPolicy: {{ $.Values.image.pullPolicy }}
  env:
    - name: REDIS_ADDR
      value: {{ include "orca.tls" $ | empty | ternary "redis" "rediss" }}://localhost:6379
    {{- with include "orca.redisPassword" $ }}
    - name: REDIS_PASSWORD
      valueFrom:
        secretKeyRef: {{ . }}
    {{- end }}
    {{- if include "orca.tls" $ }}
    - name: REDIS_EXPORTER_TLS_CA_CERT_FILE
      value: /etc/orca/tls/ca.crt
    - name: REDIS_EXPORTER_TLS_CLIENT_CERT_FILE
      value: /etc/orca/tls/tls.crt
    - name: REDIS_EXPORTER_TLS_CLIENT_KEY_FILE
      value: /etc/orca/tls/tls.key
    - name: REDIS_EXPORTER_SKIP_TLS_VERIFICATION
      value: "true"
    {{- end }}
  ports:
    - {name: exporter, containerPort: 9121}
  resources:
    {{- toYaml .resources | nindent 4 }}
  {{- include "orca.containerSecurity" (list $ "redis") | indent 2 }}
  {{- if include "orca.tls" $ }}
  volumeMounts:
    - {name: tls, mountPath: /etc/orca/tls, readOnly: true}
  {{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The volume claim of a server, or of a Sentinel: (list $ "redis" or "sentinel"). */}}
{{- define "orca.dataClaim" -}}
{{- $storage := (index (first .).Values (last .)).storage -}}
- apiVersion: v1
  kind: PersistentVolumeClaim
  metadata:
    name: data
    labels:
      {{- include "orca.selector" . | nindent 6 }}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with $storage.className }}
    storageClassName: {{ . | quote }}
    {{- end }}
    resources:
      requests: {storage: {{ $storage.size }}}
{{- end -}}

{{/* The scripts of servers and Sentinels, mounted where they look for each other. A change restarts both. */}}
{{- define "orca.redisScripts" -}}
{{ (.Files.Glob "files/*.sh").AsConfig }}
sentinel.conf: |
  {{- include "orca.sentinelConf" . | nindent 2 }}
{{- end -}}

{{- define "orca.redisScriptsSum" -}}
{{- if include "orca.sentinels" . }}{{ dict "orca.serving/scripts" (include "orca.redisScripts" . | sha256sum | trunc 16) | toYaml }}{{ end -}}
{{- end -}}

{{- define "orca.redisScriptsVolume" -}}
{{- if include "orca.sentinels" . }}
- name: scripts
  configMap: {name: {{ include "orca.name" (list . "redis") }}}
{{- end }}
{{- end -}}

{{- define "orca.redisScriptsMount" -}}
{{- if include "orca.sentinels" . }}
- {name: scripts, mountPath: /etc/orca/redis, readOnly: true}
{{- end }}
{{- end -}}

{{/*
The file that a Sentinel gets at each start. Names stay when a pod gets another address, and stand in certificates. Sentinels
that elected none of them try again after twice the failover's timeout.
*/}}
{{- define "orca.sentinelConf" -}}
{{- $milliseconds := mulf .Values.sentinel.downAfterSeconds 1000 | int -}}
port 26379
dir /tmp
protected-mode no
sentinel resolve-hostnames yes
sentinel announce-hostnames yes
sentinel down-after-milliseconds orca {{ $milliseconds }}
sentinel failover-timeout orca 6000
sentinel parallel-syncs orca {{ .Values.redis.replicas }}
{{- range include "orca.redisTls" (list . "26379") | fromJsonArray | chunk 2 }}
{{ join " " . }}
{{- end }}
{{- end -}}
