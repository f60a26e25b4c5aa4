{{/* The arrows of the network policies, one rule each. What goes out to a pod goes to the pod's port, not the Service's. */}}

{{/* A third argument is the policy's own annotations. */}}
{{- define "orca.networkPolicy" -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ include "orca.name" . }}
  {{- include "orca.metadata" . | nindent 2 }}
spec:
  podSelector:
    matchLabels:
      {{- include "orca.selector" . | nindent 6 }}
  policyTypes: [Ingress, Egress]
{{- end -}}

{{- define "orca.podsOf" -}}
- podSelector:
    matchLabels:
      {{- include "orca.selector" . | nindent 6 }}
{{- end -}}

{{/* Metrics, at one port: (list $ PORT). */}}
{{- define "orca.fromMetrics" -}}
{{- with (first .).Values.networkPolicy.metricsClients }}
- ports:
    - port: {{ last $ }}
  from:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}

{{/* The live page, at one port: (list $ PORT). */}}
{{- define "orca.fromUi" -}}
{{- if (first .).Values.ui.enabled }}
- ports:
    - port: {{ last . }}
  from:
    {{- include "orca.podsOf" (list (first .) "ui") | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "orca.toDns" -}}
- ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{- define "orca.toRedis" -}}
- ports:
    {{- range include "orca.redisPorts" . | splitList " " }}
    - port: {{ . }}
    {{- end }}
  {{- if include "orca.installsRedis" . }}
  to:
    {{- include "orca.podsOf" (list . "redis") | nindent 4 }}
  {{- end }}
{{- if include "orca.sentinels" . }}
- ports:
    - port: 26379
  to:
    {{- include "orca.podsOf" (list . "sentinel") | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "orca.toApiServer" -}}
- ports:
    {{- range .Values.networkPolicy.apiServer.ports }}
    - port: {{ include "orca.text" . }}
    {{- end }}
  {{- with .Values.networkPolicy.apiServer.cidrs }}
  to:
    {{- range . }}
    - ipBlock: {cidr: {{ . | quote }}}
    {{- end }}
  {{- end }}
{{- end -}}

{{/* The collector may be anywhere. */}}
{{- define "orca.toTraces" -}}
{{- with include "orca.otlpEndpoint" . }}
- ports:
    - port: {{ regexFind ":[0-9]+(/|$)" . | trimAll ":/" | default "4317" }}
  {{- if $.Values.jaeger.enabled }}
  to:
    {{- include "orca.podsOf" (list $ "jaeger") | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* What the init step fetches may be anywhere: (list $ "endpoint" or "worker"). */}}
{{- define "orca.toModel" -}}
{{- $source := include "orca.modelSource" . | fromYaml }}
{{- if $source.hub }}
- ports:
    - port: 443
{{- else if $source.download }}
- ports:
    - port: {{ include "orca.portOfUrl" $source.download.url }}
{{- end }}
{{- end -}}

{{- define "orca.portOfUrl" -}}
{{- $url := urlParse . -}}
{{ regexFind ":[0-9]+$" $url.host | trimPrefix ":" | default (eq $url.scheme "http" | ternary "80" "443") }}
{{- end -}}

{{- define "orca.toMore" -}}
{{- with .Values.networkPolicy.egress }}
{{ toYaml . }}
{{- end }}
{{- end -}}
