{{/* The container that waits for the rollout: (list $ SECONDS), with the name of its pod where that is Helm's hook. It has the scheduler's image. */}}
{{- define "orca.waitContainer" -}}
{{- $root := first . -}}
name: wait
image: {{ include "orca.image" (list $root "scheduler") | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
command: [python, -m, orca_scheduler.discovery.wait]
args:
  - {{ $root.Release.Name | quote }}
  - --timeout={{ include "orca.text" (index . 1) }}
  - --patience={{ include "orca.text" $root.Values.wait.patienceSeconds }}
{{- range slice . 2 }}
env:
  - name: ORCA_OWN_POD  # not an argument, which an older image would refuse
    value: {{ . | quote }}
{{- end }}
resources:
  requests: {cpu: 20m, memory: 128Mi}
  limits: {memory: 256Mi}
{{- include "orca.containerSecurity" (list $root "wait") }}
volumeMounts:
  {{- include "orca.mounts" (list $root "wait") | nindent 2 }}
{{- end -}}
