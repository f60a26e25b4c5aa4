{{/* Names, labels, and what services are told. Where a helper takes a list, it is (list $ "COMPONENT"). */}}

{{/*
What the names of all objects begin with: the release's name, so that no two releases of a namespace share one. A name that
was cut ends with a hash of the whole: pods of a StatefulSet need 63 characters in all.
*/}}
{{- define "orca.fullname" -}}
{{- $usual := list .Release.Name .Values.nameOverride | compact | join "-" -}}
{{- $name := .Values.fullnameOverride | default $usual -}}
{{- if gt (len $name) 40 -}}
{{- $name = printf "%s-%s" ($name | trunc 33 | trimSuffix "-") (sha256sum $name | trunc 6) -}}
{{- end -}}
{{ $name }}
{{- end -}}

{{/* The name of a component's objects. */}}
{{- define "orca.name" -}}
{{- printf "%s-%s" (include "orca.fullname" (first .)) (index . 1) -}}
{{- end -}}

{{/* The labels that pods are selected by. They never change, so that an upgrade changes no pod for a label's sake. */}}
{{- define "orca.selector" -}}
app.kubernetes.io/name: orca
app.kubernetes.io/instance: {{ (first .).Release.Name | quote }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end -}}

{{- define "orca.labels" -}}
{{ include "orca.selector" . }}
app.kubernetes.io/version: {{ (first .).Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ (first .).Release.Service }}
helm.sh/chart: {{ printf "%s-%s" (first .).Chart.Name (first .).Chart.Version }}
{{- end -}}

{{/* Labels and annotations of an object. A third argument is its own annotations. */}}
{{- define "orca.metadata" -}}
{{- $root := first . -}}
labels:
  {{- include "orca.overlay" (list $root.Values.commonLabels (include "orca.labels" . | fromYaml)) | nindent 2 }}
{{- with include "orca.overlay" (list $root.Values.commonAnnotations (len . | eq 3 | ternary (last .) dict)) | fromYaml }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* One map over another, key by key: (list BELOW ABOVE). A null above removes the key. */}}
{{- define "orca.overlay" -}}
{{- $result := first . | default dict | deepCopy -}}
{{- range $key, $value := last . -}}
{{- if kindIs "invalid" $value }}{{ $result = omit $result $key }}{{ else }}{{ $_ := set $result $key $value }}{{ end -}}
{{- end -}}
{{ toYaml $result }}
{{- end -}}

{{/* Whose image and whose values `pod` a component has: the check stands in for a worker. */}}
{{- define "orca.workload" -}}
{{ index . 1 | eq "check" | ternary "worker" (index . 1) }}
{{- end -}}

{{/* The image of a service of ours. */}}
{{- define "orca.image" -}}
{{- $root := first . -}}
{{- $workload := include "orca.workload" . -}}
{{- $image := $root.Values.image -}}
{{- $registry := $image.registry | trimSuffix "/" -}}
{{- $usual := printf "%sorca-%s:%s" ($registry | empty | ternary "" (printf "%s/" $registry)) $workload ($image.tag | default $root.Chart.AppVersion) -}}
{{- with index $image.digests $workload }}{{ $usual = printf "%s@%s" $usual . }}{{ end -}}
{{- (index $root.Values $workload).image | default $usual -}}
{{- end -}}

{{/* A setting's value as the environment has it: Helm reads every number as a float. */}}
{{- define "orca.text" -}}
{{- if and (kindIs "float64" .) (eq (floor .) .) }}{{ int64 . }}{{ else }}{{ . }}{{ end -}}
{{- end -}}

{{/* -- The engine -- */}}

{{- define "orca.gpusPerPod" -}}
{{ .Values.engine.gpusPerPod | default .Values.engine.tp | int }}
{{- end -}}

{{- define "orca.podsPerEngine" -}}
{{ div (mul .Values.engine.pp .Values.engine.tp) (include "orca.gpusPerPod" . | int) }}
{{- end -}}

{{/*
How many pods, as {replicas: NUMBER}: (list $ "COMPONENT" "KIND" COUNT). Without a count the number belongs to `kubectl scale` or an
autoscaler. It is left out, but for an upgrade, which repeats what the cluster has: Helm takes away a field that an earlier
revision had, and Kubernetes would then set 1.

A count is set, until somebody else has set another number. That number stays as long as the count does: Helm 3 would undo it, and
Helm 4 would stop in the middle of the upgrade, since another manager has the field. A new count then needs their consent.
*/}}
{{- define "orca.replicas" -}}
{{- $root := first . -}}
{{- $count := last . -}}
{{- $name := include "orca.name" . -}}
{{- $live := lookup "apps/v1" (index . 2) $root.Release.Namespace $name -}}
{{- $number := ($live.spec | default dict).replicas -}}
{{- if kindIs "invalid" $count -}}
{{- if $live }}{{ dict "replicas" $number | toYaml }}{{ end -}}
{{- else if and (include "orca.scaledByOthers" $live) (ne (int $number) (int $count)) -}}
{{- if ne (index ($live.metadata.annotations | default dict) "orca.serving/replicas") (toString (int $count)) -}}
{{- $command := printf "kubectl -n %s scale %s %s --replicas=%d" $root.Release.Namespace (index . 2 | lower) $name (int $count) -}}
{{- fail (printf "%s: somebody has scaled it to %d pods; before the values ask for %d, let `%s` do the same" $name (int $number) (int $count) $command) -}}
{{- end -}}
{{ dict "replicas" $number | toYaml }}
{{- else -}}
{{ dict "replicas" (int $count) | toYaml }}
{{- end -}}
{{- end -}}

{{/* Whether anybody but Helm has set the number of pods of a live object. Helm is who has written the name of the release on it. */}}
{{- define "orca.scaledByOthers" -}}
{{- range (.metadata | default dict).managedFields -}}
{{- $fields := .fieldsV1 | default dict -}}
{{- $annotations := index ($fields | dig "f:metadata" dict) "f:annotations" | default dict -}}
{{- if and (hasKey ($fields | dig "f:spec" dict) "f:replicas") (not (hasKey $annotations "f:meta.helm.sh/release-name")) }}yes{{ end -}}
{{- end -}}
{{- end -}}

{{/* What the values ask for, on the object, so that the next upgrade sees whether they ask for something new: (list COUNT). */}}
{{- define "orca.replicasAsked" -}}
{{- if not (kindIs "invalid" (first .)) }}orca.serving/replicas: {{ first . | int | quote }}{{ end -}}
{{- end -}}

{{- define "orca.history" -}}
{{- if not (kindIs "invalid" .Values.revisionHistoryLimit) }}
revisionHistoryLimit: {{ include "orca.text" .Values.revisionHistoryLimit }}
{{- end }}
{{- end -}}

{{/* What a workload's container asks for, without devices. A worker's memory is counted: the supervisor has 256 MiB. */}}
{{- define "orca.resources" -}}
{{- $root := first . -}}
{{- $resources := dict -}}
{{- if last . | eq "worker" -}}
{{- $memory := $root.Values.worker.memory -}}
{{- $sum := printf "%dMi" (add (mul (include "orca.gpusPerPod" $root) $memory.rank) $memory.forkServer $memory.shm 256) -}}
{{- $cpu := include "orca.gpusPerPod" $root | int | mul 2 | toString -}}
{{- $resources = dict "requests" (dict "memory" $sum "cpu" $cpu) "limits" (dict "memory" $sum) -}}
{{- end -}}
{{ mergeOverwrite $resources (deepCopy (index $root.Values (last .)).resources) | toYaml }}
{{- end -}}

{{/* -- The settings of services -- */}}

{{- define "orca.otlpEndpoint" -}}
{{- if .Values.jaeger.enabled -}}
http://{{ include "orca.name" (list . "jaeger") }}:4317
{{- else -}}
{{ .Values.tracing.otlpEndpoint }}
{{- end -}}
{{- end -}}

{{/* What every service of ours is told. */}}
{{- define "orca.serviceEnvironment" -}}
{{- $root := first . -}}
{{- $workload := index $root.Values (last .) -}}
- name: ORCA_HOST
  value: {{ $root.Values.host | quote }}
- name: ORCA_STATUS_PORT
  value: "9090"
{{- if hasKey $workload "drainSeconds" }}
- name: ORCA_DRAIN_SECONDS
  value: {{ include "orca.text" $workload.drainSeconds | quote }}
{{- end }}
{{- if include "orca.tls" $root }}
- name: ORCA_TLS_DIR
  value: /etc/orca/tls
{{- end }}
{{- with include "orca.otlpEndpoint" $root }}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: OTEL_EXPORTER_OTLP_ENDPOINT
  value: {{ . | quote }}
- name: OTEL_RESOURCE_ATTRIBUTES
  value: {{ printf "k8s.namespace.name=%s,k8s.pod.name=$(POD_NAME)" $root.Release.Namespace | quote }}
{{- end }}
{{- range $name, $value := $workload.settings }}
- name: ORCA_{{ upper $name }}
  value: {{ include "orca.text" $value | quote }}
{{- end }}
{{- end -}}

{{/* -- Doors, certificates, accounts -- */}}

{{/* The ports of the endpoint's Services, and what is spoken there: (list $ NODE-PORTS). */}}
{{- define "orca.doors" -}}
{{- $nodePorts := last . -}}
{{- $plain := include "orca.tls" (first .) | empty -}}
{{- range list (dict "name" "grpc" "port" 50051 "plain" "kubernetes.io/h2c") (dict "name" "http" "port" 8000 "plain" "http") }}
- name: {{ .name }}
  port: {{ .port }}
  targetPort: {{ .name }}
  appProtocol: {{ $plain | ternary .plain "https" }}
  {{- with index $nodePorts .name }}
  nodePort: {{ include "orca.text" . }}
  {{- end }}
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

{{/* The Secret with a holder's certificate: one that is given, or the one that cert-manager fills. Sentinels show Redis's, the live page the client's. */}}
{{- define "orca.tlsSecret" -}}
{{- $tls := (first .).Values.tls -}}
{{- $holder := get (dict "sentinel" "redis" "ui" "client") (last .) | default (last .) -}}
{{- if not (has $holder (include "orca.tlsHolders" (first .) | fromJsonArray)) -}}
{{- else if $tls.issuer -}}
{{ include "orca.name" (list (first .) $holder) }}-tls
{{- else -}}
{{ index $tls.secrets $holder }}
{{- end -}}
{{- end -}}

{{/*
Each component has an account, of its own unless the values name one. Only the scheduler and what
waits for it talk to the API server. A third argument is the account's own annotations.
*/}}
{{- define "orca.accountName" -}}
{{- (include "orca.pod" . | fromYaml).serviceAccount.name | default (include "orca.name" .) -}}
{{- end -}}

{{- define "orca.serviceAccount" -}}
{{- $pod := include "orca.pod" . | fromYaml -}}
{{- if $pod.serviceAccount.create -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ include "orca.accountName" . | quote }}
  {{- $annotations := list (len . | eq 3 | ternary (last .) dict) $pod.serviceAccountAnnotations -}}
  {{- include "orca.metadata" (list (first .) (index . 1) (include "orca.overlay" $annotations | fromYaml)) | nindent 2 }}
automountServiceAccountToken: {{ has (index . 1) (list "scheduler" "wait") }}
{{- end -}}
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
  {{- include "orca.metadata" $ | nindent 2 }}
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
    {{- if and (eq (last $) "redis") (include "orca.sentinels" $root) }}
    {{- range concat (include "orca.redisHosts" $root | splitList " ") (include "orca.sentinelHosts" $root | splitList " ") }}
    - {{ . }}
    {{- end }}
    {{- end }}
{{- end -}}
{{- end -}}
