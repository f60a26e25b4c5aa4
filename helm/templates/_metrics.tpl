{{/* The metadata of an object for metrics: (list $ NAME LABELS). */}}
{{- define "orca.metricsMetadata" -}}
{{- $this := list (first .) "metrics" -}}
name: {{ include "orca.name" (list (first .) (index . 1)) }}
labels:
  {{- $labels := include "orca.overlay" (list (first .).Values.commonLabels (last . | default dict)) | fromYaml }}
  {{- include "orca.overlay" (list $labels (include "orca.labels" $this | fromYaml)) | nindent 2 }}
{{- with (first .).Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The labels by which an endpoint picker knows whose metrics a pod has: llm-d's, and those of the inference extension. */}}
{{- define "orca.engineType" -}}
inference.networking.k8s.io/engine-type: orca
llm-d.ai/engine-type: orca
{{- end -}}
