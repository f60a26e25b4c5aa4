{{/* What all pods have in common. A helper that takes a list takes (list $ "COMPONENT"). */}}

{{/* The values `pod`: those of all pods, and over them those of the workload. */}}
{{- define "orca.pod" -}}
{{- $all := (first .).Values.pod | deepCopy -}}
{{- range $name, $own := (index (first .).Values (include "orca.workload" .)).pod -}}
{{- $common := index $all $name -}}
{{- if kindIs "slice" $own }}{{ $own = concat ($common | default list) $own }}{{ end -}}
{{- if and (kindIs "map" $own) (ne $name "affinity") }}{{ $own = include "orca.overlay" (list $common $own) | fromYaml }}{{ end -}}
{{- $_ := set $all $name $own -}}
{{- end -}}
{{ toYaml $all }}
{{- end -}}

{{/* The metadata of a pod template. A third argument is the workload's own annotations. */}}
{{- define "orca.podMetadata" -}}
{{- $values := (first .).Values -}}
{{- $pod := include "orca.pod" . | fromYaml -}}
{{- $router := and $values.metrics.router.enabled (eq (index . 1) "endpoint") | ternary (include "orca.engineType" . | fromYaml) dict -}}
{{- $labels := include "orca.overlay" (list $values.commonLabels $router) | fromYaml -}}
{{- $labels = include "orca.overlay" (list $labels $pod.labels) | fromYaml -}}
labels:
  {{- include "orca.overlay" (list $labels (include "orca.selector" . | fromYaml)) | nindent 2 }}
{{- $annotations := include "orca.overlay" (list $values.commonAnnotations $pod.annotations) | fromYaml -}}
{{- with include "orca.overlay" (list $annotations (len . | eq 3 | ternary (last .) dict)) | fromYaml }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The part of a pod's spec that does not depend on what runs in it. A third argument is the workload's own affinity. */}}
{{- define "orca.podSpec" -}}
{{- $root := first . -}}
{{- $component := index . 1 -}}
{{- $pod := include "orca.pod" . | fromYaml -}}
{{- $_ := set $pod "affinity" ($pod.affinity | default (len . | eq 3 | ternary (last .) dict)) -}}
serviceAccountName: {{ include "orca.accountName" (list $root (eq $component "test" | ternary "wait" $component)) }}
automountServiceAccountToken: {{ has $component (list "scheduler" "wait" "test") }}
enableServiceLinks: false  # a Service named orca-* would become ORCA_* variables, and some stop the start
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- range $field := list "securityContext" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- with index $pod $field }}
{{ dict $field . | toYaml }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A wish for few nodes, or for many: (list $ "COMPONENT" "pack" or "spread"). */}}
{{- define "orca.affinity" -}}
{{- $selector := include "orca.selector" . | fromYaml -}}
{{- $term := dict "labelSelector" (dict "matchLabels" $selector) "topologyKey" "kubernetes.io/hostname" -}}
{{- $wish := dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $term)) -}}
{{- dict (last . | eq "pack" | ternary "podAffinity" "podAntiAffinity") $wish | toYaml -}}
{{- end -}}

{{/* Steps before the container: those of `pod`, a proxy perhaps, and the workload's own, which is a third argument. */}}
{{- define "orca.initContainers" -}}
{{- $added := (include "orca.pod" . | fromYaml).initContainers -}}
{{- $own := len . | eq 3 | ternary (last .) "" -}}
{{- if or $added $own }}
initContainers:
  {{- with $added }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  {{- with $own }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Containers beside the workload's own. */}}
{{- define "orca.sidecars" -}}
{{- with (include "orca.pod" . | fromYaml).containers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "orca.containerSecurity" -}}
{{- with (include "orca.pod" . | fromYaml).containerSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Probes, and what `pod.probes` changes of them: (list $ "COMPONENT" PROBES). */}}
{{- define "orca.probes" -}}
{{- $tuned := (include "orca.pod" . | fromYaml).probes -}}
{{- range $name, $probe := last . }}
{{ $name }}:
  {{- include "orca.overlay" (list $probe (index $tuned $name)) | nindent 2 }}
{{- end }}
{{- end -}}

{{/*
Probes of the status port. A service is alive before it is ready, however long it waits for others. Readiness is asked only
after the startup probe, which is a part of each pause.
*/}}
{{- define "orca.statusProbes" -}}
startupProbe:
  httpGet: {path: /livez, port: status}
  periodSeconds: 1
  timeoutSeconds: 5
  failureThreshold: 300
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

{{/* What `pod` adds to the container. */}}
{{- define "orca.podEnvironment" -}}
{{- with (include "orca.pod" . | fromYaml).env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "orca.podEnvironmentFrom" -}}
{{- with (include "orca.pod" . | fromYaml).envFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
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
