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
{{- $_ := set $all "probes" ($all.probes | default dict) -}} {{- /* a null gives nothing */ -}}
{{- $_ := set $all "serviceAccount" ($all.serviceAccount | default (dict "create" true)) -}}
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
serviceAccountName: {{ include "orca.accountName" (list $root (eq $component "test" | ternary "wait" $component)) | quote }}
automountServiceAccountToken: {{ has $component (list "scheduler" "wait" "test") }}
enableServiceLinks: false  # a Service named orca-* would become ORCA_* variables, and some stop the start
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- $fields := list "securityContext" "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" }}
{{- $fields = concat $fields (list "schedulerName" "dnsConfig" "resourceClaims") }}
{{- if eq $component "check" }}{{ $fields = without $fields "resourceClaims" }}{{ end }} {{- /* it needs no device, and would wait for one */ -}}
{{- range $field := $fields }}
{{- with index $pod $field }}
{{ dict $field . | toYaml }}
{{- end }}
{{- end }}
{{- end -}}

{{/*
A whole pod, with all that `pod` has added to it: (list "COMPONENT" SPEC). Of variables, volumes and mounts of one name the last stays,
so that somebody's own replaces the chart's: Kubernetes refuses two of a name.
*/}}
{{- define "orca.wholePod" -}}
{{- $component := first . -}}
{{- $pod := last . -}}
{{- if $pod.Error }}{{ fail (printf "the pod of %s is no YAML: %s" $component $pod.Error) }}{{ end -}}
{{- $names := list -}}
{{- range $container := concat ($pod.initContainers | default list) $pod.containers -}}
{{- if has .name $names -}}
{{- fail (printf "pod: %s has a container named %s already; containers and initContainers need other names" $component .name) -}}
{{- end -}}
{{- $names = append $names .name -}}
{{- with .env }}{{ $_ := set $container "env" (include "orca.lastOfName" (list "name" .) | fromYamlArray) }}{{ end -}}
{{- with .volumeMounts }}{{ $_ := set $container "volumeMounts" (include "orca.lastOfName" (list "mountPath" .) | fromYamlArray) }}{{ end -}}
{{- include "orca.checkResources" (list $component .) -}}
{{- range ((.resources | default dict).claims) -}}
{{- if not (has .name (include "orca.names" $pod.resourceClaims | fromJsonArray)) -}}
{{- fail (printf "%s.resources.claims: %s.pod.resourceClaims has none of the name %s" $component $component .name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $pod.volumes }}{{ $_ := set $pod "volumes" (include "orca.lastOfName" (list "name" .) | fromYamlArray) }}{{ end -}}
{{ toYaml $pod }}
{{- end -}}

{{- define "orca.names" -}}
{{- $names := list -}}
{{- range . }}{{ $names = append $names .name }}{{ end -}}
{{ toJson $names }}
{{- end -}}

{{/* The entries of a list, each of its name once: (list KEY ENTRIES). The last one stands where the first one stood. */}}
{{- define "orca.lastOfName" -}}
{{- $key := first . -}}
{{- $entries := dict -}}
{{- $names := list -}}
{{- range last . -}}
{{- $names = append $names (index . $key) -}}
{{- $_ := set $entries (index . $key) . -}}
{{- end -}}
{{- $result := list -}}
{{- range uniq $names }}{{ $result = append $result (get $entries .) }}{{ end -}}
{{ toYaml $result }}
{{- end -}}

{{/*
A container may not ask for more than its limit, and what a device plugin counts needs a limit:
(list "COMPONENT" CONTAINER).
*/}}
{{- define "orca.checkResources" -}}
{{- $component := first . -}}
{{- $container := (last .).name -}}
{{- $resources := (last .).resources | default dict -}}
{{- range $name, $request := $resources.requests -}}
{{- if and (or (contains "/" $name) (hasPrefix "hugepages-" $name)) (not (hasKey ($resources.limits | default dict) $name)) -}}
{{- fail (printf "%s.resources: the container %s asks for %s and has no limit of it; give the limit alone" $component $container $name) -}}
{{- end -}}
{{- end -}}
{{- range $name, $limit := $resources.limits -}}
{{- $request := index ($resources.requests | default dict) $name -}}
{{- if gt (include "orca.amount" $request | float64) (include "orca.amount" $limit | float64) -}}
{{- fail (printf "%s.resources: the container %s asks for %v of %s, and its limit is %v" $component $container $request $name $limit) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* A quantity of Kubernetes as a number. */}}
{{- define "orca.amount" -}}
{{- $text := kindIs "invalid" . | ternary "0" (include "orca.text" .) -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $units := dict "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 -}}
{{- $units = merge $units (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 "Ei" 1152921504606846976) -}}
{{ mulf (trimSuffix $unit $text | float64) (get $units $unit | default 1) }}
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
  secret: {secretName: {{ . | quote }}, defaultMode: 288}  # 0440
{{- end }}
{{- with (include "orca.pod" . | fromYaml).volumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
