{{/*
The check before an upgrade. All that its Job needs is a hook as well, since the release's own objects change only afterwards:
(list $ WEIGHT).
*/}}
{{- define "orca.checkHook" -}}
helm.sh/hook: pre-install,pre-upgrade
helm.sh/hook-weight: {{ last . | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
helm.sh/hook-output-log-policy: hook-failed  # Helm 3.18 and newer print why
{{- end -}}
