{{- /* The ports on which pods listen. Ranges are of TCP. */ -}}
{{- define "kvmesh.ports" -}}
frontend: 8000      {{/* HTTP API and /metrics */}}
router: 7100        {{/* requests of frontends */}}
routerHttp: 8100    {{/* the HTTP API and /metrics of routers and pickers */}}
picker: 9002        {{/* ext_proc of gateways */}}
gossip: 7300        {{/* routers tell each other what they have booked */}}
mesh: 8001          {{/* frontends in a closed mesh: /metrics and placements, for members */}}
limits: 7400        {{/* frontends ask each other for shares of the keys' limits */}}
worker: 7000        {{/* requests */}}
metrics: 9100       {{/* /metrics and probes of workers and planner */}}
handshakeFirst: 5600 {{/* vLLM: NIXL's handshakes, one port for each data-parallel rank */}}
handshakeLast: 5663
eventsFirst: 5700   {{/* KV events over ZMQ */}}
eventsLast: 5799
transferFirst: 5800 {{/* KV, where UCX uses TCP */}}
transferLast: 5999
{{- end }}

{{- define "kvmesh.selector" -}}
app.kubernetes.io/name: kvmesh
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- with .pool }}
kvmesh.dev/pool: {{ . }}
{{- end }}
{{- end }}

{{- define "kvmesh.labels" -}}
{{ include "kvmesh.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
kvmesh.dev/mesh: {{ .root.Release.Name }}
{{- end }}

{{- define "kvmesh.discovery" -}}
kubernetes:{{ .Release.Namespace }}/{{ .Release.Name }}
{{- end }}

{{- /* Requests in flight, then KV that others still fetch; then time to end. docs/workers.md */ -}}
{{- define "kvmesh.graceSeconds" -}}
{{ add .root.Values.preStopSeconds (mul 2 .drainSeconds) 15 }}
{{- end }}

{{- /* What all pods have in common. Service links are off: they would set KVMESH_FRONTEND_PORT and the like. */ -}}
{{- define "kvmesh.pod" -}}
serviceAccountName: {{ .root.Release.Name }}-{{ .account | default .component }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "kvmesh.graceSeconds" . }}
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch # not once more through all files of a model
  seccompProfile: {type: RuntimeDefault}
{{- with .settings.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: {{ .settings.spreadOver | default "kubernetes.io/hostname" }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "kvmesh.selector" . | nindent 8 }}
{{- end }}

{{- /* What all containers have in common. */ -}}
{{- define "kvmesh.container" -}}
imagePullPolicy: {{ .root.Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if .settings.rdma }}
    add: [IPC_LOCK] # memory is pinned for RDMA
    {{- end }}
lifecycle:
  preStop:
    exec: {command: [sleep, {{ .root.Values.preStopSeconds | quote }}]}
{{- end }}

{{- define "kvmesh.identity" -}}
- name: KVMESH_POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: KVMESH_POD_UID
  valueFrom: {fieldRef: {fieldPath: metadata.uid}}
- name: KVMESH_POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: KVMESH_CONTAINER
  value: {{ . }}
{{- end }}

{{- /* The NATS server of KV events. `part` is worker or router: each has a user of its own. */ -}}
{{- define "kvmesh.natsUrl" -}}
{{- $events := .root.Values.events }}
{{- $events.natsUrl }}{{ if index $events.natsSecrets .part }}?user={{ index $events.natsUsers .part }}&password-file=/etc/kvmesh/nats/password{{ end }}
{{- end }}

{{- define "kvmesh.natsVolume" -}}
{{- with .root.Values.events }}
{{- if and (eq .transport "nats") (index .natsSecrets $.part) }}
- name: nats
  secret: {secretName: {{ index .natsSecrets $.part }}, defaultMode: 0440}
{{- end }}
{{- end }}
{{- end }}

{{- define "kvmesh.natsMount" -}}
{{- with .root.Values.events }}
{{- if and (eq .transport "nats") (index .natsSecrets $.part) }}
- {name: nats, mountPath: /etc/kvmesh/nats, readOnly: true}
{{- end }}
{{- end }}
{{- end }}

{{- /* Mutual TLS within the mesh: the secret of a part, what its container is told, and where it finds the files. */ -}}
{{- define "kvmesh.tlsSecret" -}}
{{ index .root.Values.meshTls.secrets .part | default (printf "%s-%s-mesh-tls" .root.Release.Name .part) }}
{{- end }}

{{- define "kvmesh.tlsEnv" -}}
{{- if .root.Values.meshTls.enabled }}
- name: {{ .prefix }}MESH_TLS
  value: /etc/kvmesh/mesh-tls
{{- if ne .prefix "KVMESH_FRONTEND_" }}
- name: {{ .prefix }}MESH_PROBES
  value: "true"
{{- end }}
{{- end }}
{{- end }}

{{- define "kvmesh.tlsVolume" -}}
{{- if .root.Values.meshTls.enabled }}
- name: {{ .volume | default "mesh-tls" }}
  secret:
    secretName: {{ include "kvmesh.tlsSecret" . }}
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.pem}
      - {key: tls.crt, path: cert.pem}
      - {key: tls.key, path: key.pem}
{{- end }}
{{- end }}

{{- define "kvmesh.tlsMount" -}}
{{- if .root.Values.meshTls.enabled }}
- {name: {{ .volume | default "mesh-tls" }}, mountPath: /etc/kvmesh/mesh-tls, readOnly: true}
{{- end }}
{{- end }}

{{- /* A probe by HTTP. In a closed mesh it is over TLS, without a certificate of its own. */ -}}
{{- define "kvmesh.get" -}}
httpGet: {path: {{ .path }}, port: {{ .port }}{{ if .root.Values.meshTls.enabled }}, scheme: HTTPS{{ end }}}
{{- end }}

{{- /* Settings as environment variables. JSON writes large numbers as Python reads them. */ -}}
{{- define "kvmesh.settings" -}}
{{- $decided := list "name" "host" "port" "advertise_host" "discovery" "metrics_port" "http_port" "gossip_port" "limits_port" "drain_timeout_s" "log_format" "router" "model_cache" "model_cache_mib" "api_keys_file" "processes" "connector" "kubernetes_namespace" "kubernetes_prefill" "kubernetes_decode" "record_file" "role" "engine" "engine_args" "model" "model_path" "count" "kv_events_transport" "kv_events_ports" "nats_url" "mesh_tls" "mesh_probes" "mesh_port" "http_endpoint" "ext_proc_port" "ext_proc_tls_cert" "ext_proc_tls_key" "ext_proc_client_ca" "config" }}
{{- $taken := list }}
{{- range $name, $_ := .settings }}{{ if has $name $decided }}{{ $taken = append $taken $name }}{{ end }}{{ end }}
{{- if $taken }}
{{- fail (printf "%s.settings: the chart itself decides %s; remove it here, values.yaml has what can be set" .of (join ", " $taken)) }}
{{- end }}
{{- $prefix := .prefix }}
{{- range $name, $value := .settings -}}
{{- include "kvmesh.variable" (dict "name" (printf "%s%s" $prefix (upper $name)) "value" $value) }}
{{ end }}
{{- end }}

{{- /* The frontend's settings. What they do not say of the SLO, the planner's do: counting and planning mean one SLO.
       Clients in other namespaces may say <service>.<namespace>, which a frontend cannot tell from a public name. */ -}}
{{- define "kvmesh.frontendSettings" -}}
{{- $found := deepCopy .Values.frontend.settings }}
{{- range $own, $planned := dict "slo_ttft_s" "ttft_slo_s" "slo_itl_s" "itl_slo_s" }}
{{- if and $.Values.planner.enabled (hasKey $.Values.planner.settings $planned) (not (hasKey $found $own)) }}
{{- $_ := set $found $own (get $.Values.planner.settings $planned) }}
{{- end }}
{{- end }}
{{- $own := printf "%s-frontend.%s" .Release.Name .Release.Namespace }}
{{- $_ := set $found "allowed_hosts" (compact (list $own $found.allowed_hosts) | join ",") }}
{{- toJson $found }}
{{- end }}

{{- /* Settings of a router with pods of its own. It spares answers by the frontend's SLO, unless they say another. */ -}}
{{- define "kvmesh.routerSettings" -}}
{{- $found := deepCopy .settings }}
{{- $frontend := include "kvmesh.frontendSettings" .root | fromJson }}
{{- if and (hasKey $frontend "slo_itl_s") (not (hasKey $found "slo_itl_s")) }}
{{- $_ := set $found "slo_itl_s" $frontend.slo_itl_s }}
{{- end }}
{{- toJson $found }}
{{- end }}

{{- define "kvmesh.variable" -}}
- name: {{ .name }}
  value: {{ kindIs "string" .value | ternary .value (toJson .value) | quote }}
{{- end }}

{{- /* A pool with what it takes from poolDefaults. Fails for what the schema cannot say. */ -}}
{{- define "kvmesh.pool" -}}
{{- $pool := mergeOverwrite (deepCopy .root.Values.poolDefaults) (deepCopy .pool) }}
{{- $spans := or (eq $pool.engine "vllm") (eq $pool.engine "sglang") }}
{{- if and (gt (int $pool.nodes) 1) (not $spans) }}
{{- fail (printf "pools.%s: the engine %s cannot span %d nodes; take vllm or sglang, or nodes: 1" .name $pool.engine (int $pool.nodes)) }}
{{- end }}
{{- if and $pool.engineArgs (not (or $spans (eq $pool.engine "trtllm"))) }}
{{- fail (printf "pools.%s: engineArgs are flags of vllm, sglang and trtllm; the engine is %s" .name $pool.engine) }}
{{- end }}
{{- if has .name (list "frontend" "router" "planner" "picker") }}
{{- fail (printf "pools.%s: another part has this name; choose another one" .name) }}
{{- end }}
{{- $_ := set $pool "model" (mergeOverwrite (deepCopy .root.Values.model) (deepCopy $pool.model)) }}
{{- toYaml $pool }}
{{- end }}

{{- define "kvmesh.workload" -}}
{{- $pool := include "kvmesh.pool" . | fromYaml -}}
{{ gt (int $pool.nodes) 1 | ternary "leaderworkerset" "deployment" }}/{{ .root.Release.Name }}-{{ .name }}
{{- end }}

{{- /* The number of a workload's pods. Where others set it, those that it has: `replicas` is for its first installation. */ -}}
{{- define "kvmesh.replicas" -}}
{{- $live := dict }}
{{- if .isScaled }}{{ $live = lookup .apiVersion .kind .root.Release.Namespace .name }}{{ end }}
{{- if $live }}{{ $live.spec.replicas }}{{ else }}{{ .replicas }}{{ end }}
{{- end }}

{{- /* Whether the planner sets the number of a pool's workers. */ -}}
{{- define "kvmesh.isPlanned" -}}
{{- with .root.Values.planner }}
{{- if and .enabled (or (eq $.name .decodePool) (and (eq $.name .prefillPool) (ne (.settings.mode | default "") "aggregated"))) }}true{{ end }}
{{- end }}
{{- end }}
