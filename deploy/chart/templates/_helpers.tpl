{{- define "crossdock.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What every pod has. */}}
{{- define "crossdock.pod" -}}
enableServiceLinks: false # they would set CROSSDOCK_PORT and the like
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What every container has. */}}
{{- define "crossdock.container" -}}
image: {{ include "crossdock.image" . }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
envFrom:
  - configMapRef: {name: {{ .Release.Name }}}
{{- end }}

{{- define "crossdock.env" -}}
- name: CROSSDOCK_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- range $name, $value := . }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end }}

{{- define "crossdock.database" -}}
- name: CROSSDOCK_DATABASE
  valueFrom: {secretKeyRef: {name: {{ .Values.database.secret }}, key: url}}
- name: PGPASSWORD
  valueFrom: {secretKeyRef: {name: {{ .Values.database.secret }}, key: password, optional: true}}
{{- end }}

{{- define "crossdock.podIp" -}}
valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}

{{/* Where the coordinators are: one address, or that of each pod. */}}
{{- define "crossdock.coordinators" -}}
{{- $service := printf "%s-coordinator.%s.svc:7070" .Release.Name .Release.Namespace }}
{{- $replicas := int .Values.coordinator.replicas }}
{{- if and (gt $replicas 1) (not .Values.database.secret) }}
{{- fail "coordinator.replicas above 1 needs database.secret: they share a database" }}
{{- end }}
{{- if eq $replicas 1 }}tcp://{{ $service }}{{ end }}
{{- if gt $replicas 1 }}
{{- range $number := until $replicas }}{{ if $number }},{{ end }}tcp://{{ $.Release.Name }}-coordinator-{{ $number }}.{{ $service }}{{ end }}
{{- end }}
{{- end }}

{{/* A process is alive while the checks of its watchdog pass. It may start for `.starts` times five seconds. `.ready`: the port
that says whether it is ready. `.standby`: one that waits for its turn counts as ready, so that an update goes on. */}}
{{- define "crossdock.probes" -}}
readinessProbe:
  httpGet: {path: {{ ternary "/live" "/ready" (.standby | default false) }}, port: {{ .ready | default "metrics" }}{{ if .root.Values.tls.secret }}, scheme: HTTPS{{ end }}}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /live, port: metrics{{ if .root.Values.tls.secret }}, scheme: HTTPS{{ end }}}
  periodSeconds: 20
  timeoutSeconds: 10
  failureThreshold: 6
startupProbe:
  httpGet: {path: /live, port: metrics{{ if .root.Values.tls.secret }}, scheme: HTTPS{{ end }}}
  periodSeconds: 5
  failureThreshold: {{ .starts }}
{{- end }}

{{/* The mounts that every pod has, and their volumes: keys of its role, a folder for what it writes, the certificate. */}}
{{- define "crossdock.mounts" -}}
- {name: keys, mountPath: /keys, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /tls, readOnly: true}
{{- end }}
{{- end }}

{{- define "crossdock.volumes" -}}
- name: keys
  secret: {secretName: {{ .root.Release.Name }}-{{ .role }}-keys, defaultMode: 0440}
- {name: tmp, emptyDir: {}}
{{- with .root.Values.tls.secret }}
- name: tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end }}

{{- define "crossdock.models" -}}
- name: models
  persistentVolumeClaim: {claimName: {{ .Values.model.claim | default (printf "%s-models" .Release.Name) }}, readOnly: true}
{{- end }}

{{- define "crossdock.tenants" -}}
- name: tenants
  secret: {secretName: {{ .Release.Name }}-tenants, defaultMode: 0440}
{{- end }}
