{{/* What must fit together. A misuse stops the render with one sentence. The sentences about tp and pp are the workers'. */}}

{{- define "orca.checks" -}}
{{- $old := list -}}
{{- $new := list -}}
{{- range $name := list "tp" "pp" "engines" "gpusPerPod" "gpusPerNode" "dtype" "device" "gpuResource" "slots" "placement" -}}
{{- if and (hasKey $.Values $name) (not (kindIs "invalid" (get $.Values $name))) -}}
{{- $old = append $old $name -}}
{{- $new = append $new (printf "engine.%s" (eq $name "engines" | ternary "count" $name)) -}}
{{- end -}}
{{- end -}}
{{- if $old -}}
{{- $hint := .Release.IsUpgrade | ternary (printf "; --reset-then-reuse-values with %s=null forgets the old" (join "=null," $old)) "" -}}
{{- fail (printf "%s: named %s now%s" (join ", " $old) (join ", " $new) $hint) -}}
{{- end -}}

{{- $name := include "orca.fullname" . -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- $other := printf "orca-%s" (.Values.fullnameOverride | default .Release.Name) | replace "." "-" -}}
{{- fail (printf "the name %s: Services have names of letters, digits and -, which begin with a letter; give another to the release, or fullnameOverride=%s" $name $other) -}}
{{- end -}}

{{- $values := .Values -}}
{{- $model := $values.model -}}
{{- $engine := $values.engine -}}
{{- $tp := int $engine.tp -}}
{{- $pp := int $engine.pp -}}
{{- $perPod := include "orca.gpusPerPod" . | int -}}

{{- $kinds := list "path" "claim" "download" "image" "hub" -}}
{{- $given := list -}}
{{- range $kinds }}{{ if index $model . }}{{ $given = append $given . }}{{ end }}{{ end -}}
{{- $hint := and .Release.IsUpgrade $given | empty | ternary "" "; --reuse-values keeps what a null removes, --reset-then-reuse-values does not" -}}
{{- if ne (len $given) 1 -}}
{{- fail (printf "model: exactly one of path, claim, download, image and hub says where the checkpoint is; %s given%s" (empty $given | ternary "none is" (printf "%s are" (join " and " $given))) $hint) -}}
{{- end -}}
{{- $tokenizers := list -}}
{{- range $kinds }}{{ if index $model.tokenizer . }}{{ $tokenizers = append $tokenizers . }}{{ end }}{{ end -}}
{{- if gt (len $tokenizers) 1 -}}
{{- fail (printf "model.tokenizer: one of path, claim, download, image and hub; %s are given" (join " and " $tokenizers)) -}}
{{- end -}}
{{- if and (or $model.image $model.tokenizer.image) (semverCompare "<1.33.0-0" .Capabilities.KubeVersion.Version) -}}
{{- fail (printf "model.image: volumes of OCI images need Kubernetes 1.33 with the feature gate ImageVolume; this is %s" .Capabilities.KubeVersion.Version) -}}
{{- end -}}
{{- if and $model.name (or $model.path $model.tokenizer.path) -}}
{{- fail "model.name: a folder inside an image has a name already, its own (path)" -}}
{{- end -}}
{{- if and $model.cache.claim (not (or $model.download $model.hub)) -}}
{{- fail (printf "model.cache: only what is fetched is kept (download, hub); model.%s is read where it is" (first $given)) -}}
{{- end -}}

{{- range $block := list "engine" "endpoint" -}}
{{- with (index $values $block).autoscale -}}
{{- if and .enabled (lt (int .max) (int .min)) -}}
{{- fail (printf "%s.autoscale: max, %d, is less than min, %d" $block (int .max) (int .min)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with $values.scheduler.settings.roles -}}
{{- if ne . "mixed" -}}
{{- if not (regexMatch "^prefill=[1-9][0-9]{0,5},decode=[1-9][0-9]{0,5}$" .) -}}
{{- fail (printf "scheduler.settings.roles: %s is not mixed, nor like prefill=1,decode=1: each phase needs an engine" .) -}}
{{- end -}}
{{- $engines := 0 -}}
{{- range regexFindAll "[0-9]+" . -1 }}{{ $engines = add $engines (int .) }}{{ end -}}
{{- if $engine.autoscale.enabled -}}
{{- fail (printf "scheduler.settings.roles: %s is a fixed number of engines, and engine.autoscale changes it" .) -}}
{{- end -}}
{{- if ne (int $engine.count) (int $engines) -}}
{{- fail (printf "scheduler.settings.roles: %s is %d engines, and engine.count is %d" . (int $engines) (int $engine.count)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if mod $tp $perPod -}}
{{- fail (printf "engine.gpusPerPod: %d is no divisor of tp, %d" $perPod $tp) -}}
{{- end -}}
{{- with $engine.gpusPerNode -}}
{{- if gt $perPod (int .) -}}
{{- fail (printf "engine.gpusPerPod: a pod of %d ranks fits on no node, which has %d GPUs (gpusPerNode)" $perPod (int .)) -}}
{{- end -}}
{{- end -}}
{{- if and $engine.kvDtype (eq $engine.device "cuda") -}}
{{- fail (printf "engine.kvDtype: %s is read on a CPU alone, and engine.device is cuda" $engine.kvDtype) -}}
{{- end -}}
{{- with $model.numHeads -}}
{{- if mod (int .) $tp -}}
{{- fail (printf "tp %d: %d heads cannot be shared evenly by %d tensor ranks" $tp (int .) $tp) -}}
{{- end -}}
{{- end -}}
{{- with $model.numLayers -}}
{{- if lt (int .) $pp -}}
{{- fail (printf "pp %d: %d layers are too few for %d stages" $pp (int .) $pp) -}}
{{- end -}}
{{- end -}}

{{- if and $values.redis.externalUrl $values.redis.externalUrlSecret -}}
{{- fail "redis: externalUrl or externalUrlSecret, not both" -}}
{{- end -}}
{{- $external := or $values.redis.externalUrl $values.redis.externalUrlSecret -}}
{{- if and $external (include "orca.sentinels" .) -}}
{{- fail "redis.mode: sentinel installs servers and Sentinels; with externalUrl or externalUrlSecret there are others" -}}
{{- end -}}
{{- if and $external $values.redis.password.generate -}}
{{- fail "redis.password.generate: the password of a Redis that the release does not install is made there; give secret" -}}
{{- end -}}
{{- if and $external $values.redis.exporter.enabled -}}
{{- fail "redis.exporter: it stands beside a Redis that the release installs; externalUrl or externalUrlSecret names another" -}}
{{- end -}}
{{- if and (or $external (include "orca.sentinels" .)) (not $values.redis.evictable) -}}
{{- fail "redis.evictable: false is for the single Redis of the release; with Sentinels one server may be away" -}}
{{- end -}}
{{- if and $values.redis.password.generate $values.redis.password.secret -}}
{{- fail "redis.password: generate or secret, not both" -}}
{{- end -}}
{{- if and $values.jaeger.enabled $values.tracing.otlpEndpoint -}}
{{- fail "jaeger.enabled, tracing.otlpEndpoint: spans go to one of them, not both" -}}
{{- end -}}
{{- $account := $values.pod.serviceAccount | default dict -}}
{{- if and $account.create $account.name -}}
{{- fail "pod.serviceAccount: create makes an account for each workload; one name for all is for an account that is there (create: false)" -}}
{{- end -}}
{{- if and $values.endpoint.service.nodePorts (eq $values.endpoint.service.type "ClusterIP") -}}
{{- fail "endpoint.service.nodePorts: a Service of type ClusterIP has none; its type must be NodePort or LoadBalancer" -}}
{{- end -}}
{{- $holders := include "orca.tlsHolders" . | fromJsonArray -}}
{{- $without := list -}}
{{- range $holders }}{{ if not (index $values.tls.secrets .) }}{{ $without = append $without . }}{{ end }}{{ end -}}
{{- if and $values.tls.issuer (lt (len $without) (len $holders)) -}}
{{- fail "tls: an issuer makes the certificates, or secrets hold them, not both" -}}
{{- end -}}
{{- if and $without (lt (len $without) (len $holders)) -}}
{{- fail (printf "tls.secrets: mTLS is for all of %s or for none; %s missing" (join ", " $holders) (join ", " $without)) -}}
{{- end -}}
{{/* Names as the chart gave them up to 0.1.0: under others an upgrade would begin with an empty pool. */}}
{{- $before := contains "orca" .Release.Name | ternary .Release.Name (printf "%s-orca" .Release.Name) | trunc 40 | trimSuffix "-" -}}
{{- if and .Release.IsUpgrade (ne $before (include "orca.fullname" .)) -}}
{{- with lookup "apps/v1" "StatefulSet" .Release.Namespace (printf "%s-worker" $before) -}}
{{- if eq (index (.metadata.annotations | default dict) "meta.helm.sh/release-name") $.Release.Name -}}
{{- fail (printf "fullnameOverride: the objects of this release are named %s-*; give fullnameOverride=%s to keep them and the pool" $before $before) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- with include "orca.routedModel" . -}}
{{- if has . $values.endpoint.otherModels -}}
{{- fail (printf "endpoint.otherModels: %s is this release's own model; endpoint.settings.served_model_name gives it another name" .) -}}
{{- end -}}
{{- end -}}
{{- $gateway := $values.gateway -}}
{{- if $gateway.parentRefs -}}
{{- if not (and $gateway.httpHostnames $gateway.grpcHostnames) -}}
{{- fail "gateway: httpHostnames and grpcHostnames are both required; a Gateway does not share a hostname between the two" -}}
{{- end -}}
{{- range $gateway.httpHostnames -}}
{{- if has . $gateway.grpcHostnames -}}
{{- fail (printf "gateway: %s stands in httpHostnames and grpcHostnames; a Gateway does not share a hostname between the two" .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
