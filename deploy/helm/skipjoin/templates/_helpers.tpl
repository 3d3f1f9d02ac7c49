{{- define "skipjoin.name" -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- define "skipjoin.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}
{{- define "skipjoin.labels" -}}
{{ include "skipjoin.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}
{{- define "skipjoin.secret" -}}
{{- .Values.keys.existingSecret | default (include "skipjoin.name" .) -}}
{{- end -}}
{{/* Checksum of a secret's data: of the release's own, or of one in the cluster, which `helm template` cannot see. */}}
{{- define "skipjoin.checksum" -}}
{{- $found := lookup "v1" "Secret" .root.Release.Namespace .name | default dict -}}
{{- get $found "data" | default dict | toJson | sha256sum -}}
{{- end -}}
{{- define "skipjoin.setting" -}}
{{- get .root.Values.settings .name | default (get .root.Values.settings (.name | replace "-" "_")) -}}
{{- end -}}
{{- define "skipjoin.scheme" -}}
{{- if include "skipjoin.setting" (dict "root" . "name" "ssl-ca-certs") -}}
{{- fail "settings.ssl-ca-certs must not be set: probes have no certificate. Check certificates of clients in an ingress" -}}
{{- end -}}
{{- if or .Values.tls.existingSecret (include "skipjoin.setting" (dict "root" . "name" "ssl-certfile")) -}}
HTTPS
{{- else -}}
HTTP
{{- end -}}
{{- end -}}
{{- define "skipjoin.probe" -}}
httpGet: {path: {{ .path }}, port: http, scheme: {{ include "skipjoin.scheme" .root }}}
{{- end -}}
