{{/* Names, labels, and what all pods have in common. Where a helper takes a list, it is (list $ "COMPONENT"). */}}

{{- define "orca.fullname" -}}
{{- $name := contains "orca" .Release.Name | ternary .Release.Name (printf "%s-orca" .Release.Name) -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* The name of a component's objects. */}}
{{- define "orca.name" -}}
{{- printf "%s-%s" (include "orca.fullname" (first .)) (last .) -}}
{{- end -}}

{{/* The labels that pods are selected by. They never change, so that an upgrade changes no pod for a label's sake. */}}
{{- define "orca.selector" -}}
app.kubernetes.io/name: orca
app.kubernetes.io/instance: {{ (first .).Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end -}}

{{- define "orca.labels" -}}
{{ include "orca.selector" . }}
app.kubernetes.io/version: {{ (first .).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (first .).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (first .).Chart.Name (first .).Chart.Version }}
{{- end -}}

{{/* The image of a service of ours. */}}
{{- define "orca.image" -}}
{{- $root := first . -}}
{{- $image := $root.Values.image -}}
{{- $registry := $image.registry | trimSuffix "/" -}}
{{- $usual := printf "%sorca-%s:%s" ($registry | empty | ternary "" (printf "%s/" $registry)) (last .) ($image.tag | default $root.Chart.AppVersion) -}}
{{- (index $root.Values (last .)).image | default $usual -}}
{{- end -}}

{{/* A setting's value as the environment has it: Helm reads every number as a float. */}}
{{- define "orca.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* -- The engine -- */}}

{{- define "orca.gpusPerPod" -}}
{{ .Values.gpusPerPod | default .Values.tp | int }}
{{- end -}}

{{- define "orca.podsPerEngine" -}}
{{ div (mul .Values.pp .Values.tp) (include "orca.gpusPerPod" . | int) }}
{{- end -}}

{{/* What a workload's container asks for, without devices. A worker's memory is counted: the supervisor has 256 MiB. */}}
{{- define "orca.resources" -}}
{{- $root := first . -}}
{{- $resources := dict -}}
{{- if last . | eq "worker" -}}
{{- $memory := $root.Values.worker.memory -}}
{{- $sum := printf "%dMi" (add (mul (include "orca.gpusPerPod" $root) $memory.rank) $memory.forkServer $memory.shm 256) -}}
{{- $resources = dict "requests" (dict "memory" $sum) "limits" (dict "memory" $sum) -}}
{{- end -}}
{{ mergeOverwrite $resources (deepCopy (index $root.Values (last .)).resources) | toJson }}
{{- end -}}

{{/* -- The pool and the traces -- */}}

{{- define "orca.installsRedis" -}}
{{- if not (or .Values.redis.externalUrl .Values.redis.externalUrlSecret) }}yes{{ end -}}
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

{{- define "orca.otlpEndpoint" -}}
{{- if .Values.jaeger.enabled -}}
http://{{ include "orca.name" (list . "jaeger") }}:4317
{{- else -}}
{{ .Values.tracing.otlpEndpoint }}
{{- end -}}
{{- end -}}

{{/* The pool's settings, of endpoint and scheduler. */}}
{{- define "orca.poolEnvironment" -}}
- name: ORCA_REDIS_URL
  {{- with .Values.redis.externalUrlSecret }}
  valueFrom:
    secretKeyRef: {{ dict "name" .name "key" .key | toJson }}
  {{- else }}
  value: {{ .Values.redis.externalUrl | default (printf "%s://%s:6379/0" (include "orca.tls" . | empty | ternary "redis" "rediss") (include "orca.name" (list . "redis"))) }}
  {{- end }}
- name: ORCA_POOL  # two releases on one Redis never share a pool
  value: {{ .Release.Namespace }}.{{ .Release.Name }}
{{- end -}}

{{/* What every service of ours is told. */}}
{{- define "orca.serviceEnvironment" -}}
{{- $root := first . -}}
{{- $workload := index $root.Values (last .) -}}
- name: ORCA_HOST
  value: "0.0.0.0"
- name: ORCA_STATUS_PORT
  value: "9090"
- name: ORCA_DRAIN_SECONDS
  value: {{ include "orca.text" $workload.drainSeconds | quote }}
{{- if include "orca.tls" $root }}
- name: ORCA_TLS_DIR
  value: /etc/orca/tls
{{- end }}
{{- with include "orca.otlpEndpoint" $root }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: k8s.namespace.name={{ $root.Release.Namespace }},k8s.pod.name=$(POD_NAME)
{{- end }}
{{- range $name, $value := $workload.settings }}
- name: ORCA_{{ upper $name }}
  value: {{ include "orca.text" $value | quote }}
{{- end }}
{{- end -}}

{{/* -- Pods -- */}}

{{/* The values `pod`: those of all pods, and over them those of the workload. */}}
{{- define "orca.pod" -}}
{{- $all := (first .).Values.pod | deepCopy -}}
{{- range $name, $own := (index (first .).Values (last .)).pod -}}
{{- $common := index $all $name -}}
{{- if kindIs "slice" $own }}{{ $own = concat ($common | default list) $own }}{{ end -}}
{{- if and (kindIs "map" $own) (ne $name "affinity") }}{{ $own = merge (deepCopy $own) ($common | default dict) }}{{ end -}}
{{- $_ := set $all $name $own -}}
{{- end -}}
{{ toYaml $all }}
{{- end -}}

{{/* The metadata of a pod template. */}}
{{- define "orca.podMetadata" -}}
{{- $pod := include "orca.pod" . | fromYaml -}}
labels:
  {{- include "orca.selector" . | nindent 2 }}
  {{- with $pod.labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with $pod.annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The part of a pod's spec that does not depend on what runs in it. A third argument is the workload's own affinity. */}}
{{- define "orca.podSpec" -}}
{{- $root := first . -}}
{{- $component := index . 1 -}}
{{- $pod := include "orca.pod" (list $root $component) | fromYaml -}}
serviceAccountName: {{ include "orca.name" (list $root $component) }}
automountServiceAccountToken: {{ has $component (list "scheduler" "wait") }}
enableServiceLinks: false  # a Service named orca-* would become ORCA_* variables, which no service knows
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $pod.nodeSelector }}
nodeSelector: {{ toJson . }}
{{- end }}
{{- with $pod.tolerations }}
tolerations: {{ toJson . }}
{{- end }}
{{- with $pod.affinity | default (len . | eq 3 | ternary (last .) dict) }}
affinity: {{ toJson . }}
{{- end }}
{{- with $pod.topologySpreadConstraints }}
topologySpreadConstraints: {{ toJson . }}
{{- end }}
{{- with $pod.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $pod.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* A wish for few nodes, or for many: (list $ "COMPONENT" "pack" or "spread"). */}}
{{- define "orca.affinity" -}}
{{- $selector := include "orca.selector" (list (first .) (index . 1)) | fromYaml -}}
{{- $term := dict "labelSelector" (dict "matchLabels" $selector) "topologyKey" "kubernetes.io/hostname" -}}
{{- $wish := dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) -}}
{{- dict (last . | eq "pack" | ternary "podAffinity" "podAntiAffinity") $wish | toYaml -}}
{{- end -}}

{{- define "orca.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* Probes of the status port. A service is alive before it is ready, however long it waits for others. */}}
{{- define "orca.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: status}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 60
readinessProbe:
  httpGet: {path: /readyz, port: status}
  periodSeconds: 2
  timeoutSeconds: 5
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: status}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
{{- end -}}

{{/* The ports of the endpoint's Services, and what is spoken there. */}}
{{- define "orca.doors" -}}
{{- $tls := include "orca.tls" . -}}
- {name: grpc, port: 50051, targetPort: grpc, appProtocol: {{ $tls | empty | ternary "kubernetes.io/h2c" "https" }}}
- {name: http, port: 8000, targetPort: http, appProtocol: {{ $tls | empty | ternary "http" "https" }}}
{{- end -}}

{{/* What `pod` adds to the container. */}}
{{- define "orca.podEnvironment" -}}
{{- with (include "orca.pod" . | fromYaml).env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "orca.podEnvironmentFrom" -}}
{{- with (include "orca.pod" . | fromYaml).envFrom }}
envFrom: {{ toJson . }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes of all of our containers: /tmp, a certificate, and what `pod` adds. */}}
{{- define "orca.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if include "orca.tlsSecret" . }}
- {name: tls, mountPath: /etc/orca/tls, readOnly: true}
{{- end }}
{{- with (include "orca.pod" . | fromYaml).volumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "orca.volumes" -}}
- name: tmp
  emptyDir: {}
{{- with include "orca.tlsSecret" . }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 288}  # 0440
{{- end }}
{{- with (include "orca.pod" . | fromYaml).volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Whether connections are mTLS. */}}
{{- define "orca.tls" -}}
{{- if or .Values.tls.issuer .Values.tls.secrets.endpoint }}yes{{ end -}}
{{- end -}}

{{/* Who has a certificate: Redis only when the release installs it. The client is the one of `helm test`. */}}
{{- define "orca.tlsHolders" -}}
{{- $holders := list "endpoint" "scheduler" "worker" "client" -}}
{{ include "orca.installsRedis" . | empty | ternary $holders (append $holders "redis") | toJson }}
{{- end -}}

{{/* The Secret with a holder's certificate: one that is given, or the one that cert-manager fills. */}}
{{- define "orca.tlsSecret" -}}
{{- $tls := (first .).Values.tls -}}
{{- if not (has (last .) (include "orca.tlsHolders" (first .) | fromJsonArray)) -}}
{{- else if $tls.issuer -}}
{{ include "orca.name" . }}-tls
{{- else -}}
{{ index $tls.secrets (last .) }}
{{- end -}}
{{- end -}}

{{/* Each component has an account of its own. Only the scheduler and what waits for it talk to the API server. */}}
{{- define "orca.serviceAccount" -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "orca.name" . }}
  labels:
    {{- include "orca.labels" . | nindent 4 }}
  {{- with (include "orca.pod" . | fromYaml).serviceAccountAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
automountServiceAccountToken: {{ has (last .) (list "scheduler" "wait") }}
{{- end -}}

{{/* A certificate of cert-manager for the names under which others reach the service, and for the name of its role. */}}
{{- define "orca.certificate" -}}
{{- $root := first . -}}
{{- $name := include "orca.name" . -}}
{{- with $root.Values.tls.issuer -}}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ $name }}
  labels:
    {{- include "orca.labels" $ | nindent 4 }}
spec:
  secretName: {{ $name }}-tls
  issuerRef:
    {{- toYaml . | nindent 4 }}
  usages: [server auth, client auth]
  dnsNames:
    - {{ last $ }}.orca.internal
    {{- if eq (last $) "endpoint" }}
    - localhost  # of `kubectl port-forward`
    {{- end }}
    - {{ $name }}
    - {{ $name }}.{{ $root.Release.Namespace }}.svc
    - "*.{{ $name }}.{{ $root.Release.Namespace }}.svc"
{{- end -}}
{{- end -}}
