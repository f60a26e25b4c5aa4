{{/*
The model: where a service finds the checkpoint, and how it gets there. A helper that takes a list takes
(list $ "endpoint" or "worker"), and "check" for a worker's model without its weights.
*/}}

{{/* The source that a service reads from, as {KIND: ..}: the endpoint has `model.tokenizer` if it is given. */}}
{{- define "orca.modelSource" -}}
{{- $model := (first .).Values.model -}}
{{- $kinds := list "path" "claim" "download" "image" "hub" -}}
{{- $given := dict -}}
{{- range $kinds }}{{ if index $model.tokenizer . }}{{ $_ := set $given . (index $model.tokenizer .) }}{{ end }}{{ end -}}
{{- if or (ne (last .) "endpoint") (empty $given) -}}
{{- $given = dict -}}
{{- range $kinds }}{{ if index $model . }}{{ $_ := set $given . (index $model .) }}{{ end }}{{ end -}}
{{- end -}}
{{ toYaml $given }}
{{- end -}}

{{/* The name that clients see: that of the endpoint's folder. */}}
{{- define "orca.modelName" -}}
{{- $model := .Values.model -}}
{{- $inImage := (include "orca.modelSource" (list . "endpoint") | fromYaml).path | default $model.path -}}
{{- if $inImage -}}
{{ base $inImage }}
{{- else if $model.name -}}
{{ $model.name }}
{{- else if $model.claim -}}
{{ $model.claim.path | default $model.claim.name | base }}
{{- else if $model.download -}}
{{ regexReplaceAll "[.](tar|tgz|tar[.][a-z0-9]+)$" ((urlParse $model.download.url).path | base) "" }}
{{- else if $model.image -}}
{{ $model.image.reference | splitList "@" | first | base | splitList ":" | first }}
{{- else if $model.hub -}}
{{ base $model.hub.name }}
{{- end -}}
{{- end -}}

{{/* The name by which routes find this release among others at the same hostnames; empty without others. */}}
{{- define "orca.routedModel" -}}
{{- if .Values.endpoint.otherModels -}}
{{ .Values.endpoint.settings.served_model_name | default (include "orca.modelName" .) }}
{{- end -}}
{{- end -}}

{{/* The folder that a service reads. A volume is mounted at /models, so its paths continue from there. */}}
{{- define "orca.modelFolder" -}}
{{- $source := include "orca.modelSource" . | fromYaml -}}
{{- $within := ($source.claim | default $source.image | default dict).path | default (include "orca.modelName" (first .)) -}}
{{- $source.path | default (printf "/models/%s" (trimSuffix "/" $within)) -}}
{{- end -}}

{{/* The endpoint's name of the model, where that is not the name of its folder. */}}
{{- define "orca.servedModelName" -}}
{{- $name := include "orca.modelName" . -}}
{{- if and (ne $name (include "orca.modelFolder" (list . "endpoint") | base)) (not (hasKey .Values.endpoint.settings "served_model_name")) -}}
- name: ORCA_SERVED_MODEL_NAME
  value: {{ $name | quote }}
{{- end -}}
{{- end -}}

{{/* The init step that fetches the checkpoint, or of the endpoint's the tokenizer; nothing for a folder that is mounted. */}}
{{- define "orca.modelFetch" -}}
{{- $root := first . -}}
{{- $source := include "orca.modelSource" . | fromYaml -}}
{{- if or $source.download $source.hub -}}
- name: model
  image: {{ include "orca.image" . | quote }}
  imagePullPolicy: {{ $root.Values.image.pullPolicy }}
  terminationMessagePolicy: FallbackToLogsOnError
  command: [python, -m, orca_common.fetch_model]
  args:
    - {{ printf "--to=%s" (include "orca.modelFolder" .) | quote }}
    {{- with $source.hub }}
    - {{ printf "--hub=%s" .name | quote }}
    {{- with .revision }}
    - {{ printf "--revision=%s" . | quote }}
    {{- end }}
    {{- end }}
    {{- with $source.download }}
    - {{ printf "--url=%s" .url | quote }}
    {{- with .sha256 }}
    - --sha256={{ . }}
    {{- end }}
    {{- end }}
    {{- with get (dict "endpoint" "--tokenizer-only" "check" "--config-only") (last .) }}
    - {{ . }}
    {{- end }}
  {{- $variable := $source.hub | empty | ternary "FETCH_HEADER" "HF_TOKEN" -}}
  {{- $secret := ($source.hub | default dict).tokenSecret | default ($source.download | default dict).headerSecret }}
  {{- $env := (include "orca.pod" . | fromYaml).env }}
  {{- if or $secret $env }}
  env:
    {{- with $secret }}
    - name: {{ $variable }}
      valueFrom:
        secretKeyRef: {{ dict "name" .name "key" .key | toJson }}
    {{- end }}
    {{- with $env }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- include "orca.podEnvironmentFrom" . | indent 2 }}
  resources:
    {{- include "orca.resources" . | nindent 4 }}
  {{- include "orca.containerSecurity" . | indent 2 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    {{- include "orca.mounts" . | nindent 4 }}
{{- end -}}
{{- end -}}

{{/*
The mount of the checkpoint in the service's own container. A volume is mounted whole and its folder is looked for inside: kubelet
makes a subPath that is not there, with mode 777, or waits for it on a volume that it cannot write.
*/}}
{{- define "orca.modelMount" -}}
{{- $source := include "orca.modelSource" . | fromYaml -}}
{{- $volume := $source.claim | default $source.image -}}
{{- if and $volume (not $volume.path) }}
- {name: models, mountPath: {{ include "orca.modelFolder" . | quote }}, readOnly: true}
{{- else if not $source.path }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end -}}

{{- define "orca.modelVolume" -}}
{{- $root := first . -}}
{{- $source := include "orca.modelSource" . | fromYaml -}}
{{- $cache := $root.Values.model.cache -}}
{{- if $source.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ $source.claim.name | quote }}, readOnly: true}
{{- else if $source.image }}
- name: models
  image: {reference: {{ $source.image.reference | quote }}, pullPolicy: {{ $root.Values.image.pullPolicy }}}
{{- else if and (not $source.path) (eq (last .) "worker") $cache.claim }}
- name: models
  persistentVolumeClaim: {claimName: {{ $cache.claim | quote }}}
{{- else if and (not $source.path) (eq (last .) "worker") $cache.size }}
- name: models
  emptyDir: {sizeLimit: {{ $cache.size }}}
{{- else if not $source.path }}
- name: models
  emptyDir: {}
{{- end }}
{{- end -}}

{{/* The adapters as the setting has them: NAME=FOLDER,NAME=FOLDER. */}}
{{- define "orca.adapterList" -}}
{{- $all := list -}}
{{- range $name, $folder := .Values.engine.adapters -}}
{{- $all = append $all (printf "%s=%s" $name $folder) -}}
{{- end -}}
{{- join "," $all -}}
{{- end -}}

{{- define "orca.adapters" -}}
{{- with include "orca.adapterList" . }}
- name: ORCA_ADAPTERS
  value: {{ . | quote }}
{{- end }}
{{- end -}}
