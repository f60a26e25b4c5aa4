{{/* The container that waits for the rollout: (list $ SECONDS). It has the scheduler's image, where the code is. */}}
{{- define "orca.waitContainer" -}}
{{- $root := first . -}}
name: wait
image: {{ include "orca.image" (list $root "scheduler") | quote }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
terminationMessagePolicy: FallbackToLogsOnError
command: [python, -m, orca_scheduler.discovery.wait]
args:
  - {{ $root.Release.Name | quote }}
  - --timeout={{ include "orca.text" (last .) }}
  - --patience={{ include "orca.text" $root.Values.wait.patienceSeconds }}
resources:
  requests: {cpu: 20m, memory: 128Mi}
  limits: {memory: 256Mi}
{{- include "orca.containerSecurity" (list $root "wait") }}
volumeMounts:
  {{- include "orca.mounts" (list $root "wait") | nindent 2 }}
{{- end -}}
