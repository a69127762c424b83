{{- define "baton.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- /* Nodes are chosen by their pool, which is the role with which they start: their role may change. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{ ternary "baton/pool" "app.kubernetes.io/component" (has .role (list "prefill" "decode")) }}: {{ .role }}
{{- end }}

{{- define "baton.labels" -}}
{{ include "baton.selector" . }}
{{- if has .role (list "prefill" "decode") }}
app.kubernetes.io/component: node
{{- end }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: baton
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- /* The roles of nodes that this release has, separated by blanks. */}}
{{- define "baton.nodeRoles" -}}
prefill decode{{ if or (gt (int .Values.encode.replicas) 0) .Values.encode.autoscaling.kind }} encode{{ end }}
{{- end }}

{{- /* Nobody starts a cluster that is open to its whole network without having said so. */}}
{{- define "baton.checkProtection" -}}
{{- /* A name of a Service has at most 63 characters, and a StatefulSet's, such as a LeaderWorkerSet makes, at most 52.
A node on several hosts has one of its own, with the node's number in its name. */}}
{{- $longest := ternary 47 (ternary 41 44 (gt (max (int .Values.prefill.hosts) (int .Values.decode.hosts)) 1)) (eq .Values.nodes.kind "Deployment") }}
{{- if gt (len (include "baton.name" .)) $longest }}{{ fail (printf "%s is too long for the names of Services and pods: choose a release name with which it has at most %d characters" (include "baton.name" .) $longest) }}{{ end }}
{{- if not .Values.insecure }}
{{- if not .Values.tls.existingSecret }}{{ fail "tls.existingSecret: name a secret with the files of `baton certs init`, or say insecure: true if this network is trusted" }}{{ end }}
{{- if not .Values.apiKeys.existingSecret }}{{ fail "apiKeys.existingSecret: name a secret with the file of `baton keys add`, or say insecure: true if this network is trusted" }}{{ end }}
{{- end }}
{{- if and (not .Values.redis.enabled) (not .Values.redis.url) (not .Values.redis.urlSecret.name) }}{{ fail "redis.url or redis.urlSecret: say where Redis is, or redis.enabled: true" }}{{ end }}
{{- range $role := splitList " " (include "baton.nodeRoles" $) }}
{{- with (index $.Values $role).autoscaling }}
{{- if .kind }}
{{- if $.Values.scaler.enabled }}{{ fail (printf "%s.autoscaling.kind: with scaler.enabled routers change the number of nodes; leave one of them out" $role) }}{{ end }}
{{- if eq $.Values.nodes.kind "DisaggregatedSet" }}{{ fail (printf "%s.autoscaling.kind: a DisaggregatedSet can't be scaled; use nodes.kind Deployment or LeaderWorkerSet" $role) }}{{ end }}
{{- if gt (int .minReplicas) (int .maxReplicas) }}{{ fail (printf "%s.autoscaling.minReplicas: must be at most maxReplicas (%d)" $role (int .maxReplicas)) }}{{ end }}
{{- if not .metrics }}{{ fail (printf "%s.autoscaling.metrics: name a metric and its value for one pod" $role) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- if and .Values.scaler.enabled (eq .Values.nodes.kind "DisaggregatedSet") }}{{ fail "scaler.enabled: a DisaggregatedSet can't be scaled; use nodes.kind Deployment or LeaderWorkerSet" }}{{ end }}
{{- if and .Values.scaler.enabled (not .Values.config) }}
{{- range $flag := list "planner" "max-nodes" }}
{{- if not (hasKey ($.Values.router.flags | default dict) $flag) }}{{ fail (printf "scaler.enabled: router.flags needs %s, by which routers decide on the number of nodes" $flag) }}{{ end }}
{{- end }}
{{- end }}
{{- if .Values.gateway.enabled }}
{{- if not .Values.gateway.parentRefs }}{{ fail "gateway.parentRefs: name the gateway that is to serve the routes" }}{{ end }}
{{- if .Values.gateway.grpcHostnames }}
{{- /* A gateway accepts only one of two routes of different kinds that share a host (GRPCRoute's `hostnames`). */}}
{{- if not .Values.gateway.hostnames }}{{ fail "gateway.hostnames: name the hosts of the HTTPRoute, since the GRPCRoute needs others" }}{{ end }}
{{- range .Values.gateway.grpcHostnames }}{{ if has . $.Values.gateway.hostnames }}{{ fail (printf "gateway.grpcHostnames: %s is in gateway.hostnames, too; gRPC needs a host of its own" .) }}{{ end }}{{ end }}
{{- end }}
{{- end }}
{{- if and .Values.ingress.enabled (not .Values.ingress.host) (not .Values.ingress.grpcHost) }}{{ fail "ingress.host, ingress.grpcHost: name the host of at least one Ingress" }}{{ end }}
{{- if and .Values.model.generates (eq (int .Values.decode.replicas) 0) }}{{ fail "decode.replicas: without decode nodes nothing is generated; give at least 1, or say model.generates: false for a model that makes vectors alone" }}{{ end }}
{{- if and (not .Values.model.generates) (or (gt (int .Values.decode.replicas) 0) .Values.decode.autoscaling.kind) }}{{ fail "decode.replicas: a model that generates nothing (model.generates: false) has no decode nodes; give 0, and no decode.autoscaling.kind" }}{{ end }}
{{- if and .Values.model.volume (not .Values.model.path) }}{{ fail "model.path: say where model.volume is to be mounted" }}{{ end }}
{{- end }}

{{- /* A map of flags as arguments. A whole number is one, though YAML's numbers arrive as floats; `true` stands for a flag
that takes no value, and `false` leaves it out. */}}
{{- define "baton.flags" -}}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}
{{- if $value }}
- --{{ $flag }}
{{- end }}
{{- else }}
- --{{ $flag }}
- {{ if and (kindIs "float64" $value) (eq (floor $value) $value) }}{{ $value | int64 | toString | quote }}{{ else }}{{ $value | toString | quote }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.image" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
{{- end }}

{{- /* What all processes are told. */}}
{{- define "baton.commonArgs" -}}
- --cluster
- {{ .root.Values.cluster | quote }}
- --host
- $(POD_IP)
- --drain-s
- {{ .root.Values.drainSeconds | toString | quote }}
{{- with .root.Values.model.path }}
- --model
- {{ . | quote }}
{{- end }}
{{- with .root.Values.model.name }}
- --model-name
- {{ . | quote }}
{{- end }}
{{- if .root.Values.config }}
- --config
- /etc/baton/config/baton.toml
{{- end }}
{{- if .root.Values.tls.existingSecret }}
- --tls-cert
- /etc/baton/tls/{{ .certificate }}.crt
- --tls-key
- /etc/baton/tls/{{ .certificate }}.key
- --tls-ca
- /etc/baton/tls/ca.crt
{{- end }}
{{- if .root.Values.apiKeys.existingSecret }}
- --api-keys
- /etc/baton/keys/keys
{{- end }}
{{- end }}

{{- define "baton.env" -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- if .root.Values.insecure }}
- name: BATON_INSECURE
  value: "true"
{{- end }}
{{- if and .root.Values.redis.enabled .root.Values.redis.passwordSecret }}
- name: REDIS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ quote .root.Values.redis.passwordSecret }}, key: password}}
{{- end }}
- name: BATON_REGISTRY
{{- if .root.Values.redis.enabled }}
  value: redis://{{ if .root.Values.redis.passwordSecret }}:$(REDIS_PASSWORD)@{{ end }}{{ include "baton.name" .root }}-redis:6379
{{- else if .root.Values.redis.urlSecret.name }}
  valueFrom: {secretKeyRef: {name: {{ quote .root.Values.redis.urlSecret.name }}, key: {{ quote .root.Values.redis.urlSecret.key }}}}
{{- else }}
  value: {{ .root.Values.redis.url | quote }}
{{- end }}
{{- with .own.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.model.volume }}
- {name: model, mountPath: {{ .root.Values.model.path | quote }}, readOnly: true}
{{- end }}
{{- if .root.Values.config }}
- {name: config, mountPath: /etc/baton/config, readOnly: true}
{{- end }}
{{- if .root.Values.tls.existingSecret }}
- {name: tls, mountPath: /etc/baton/tls, readOnly: true}
{{- end }}
{{- if .root.Values.apiKeys.existingSecret }}
- {name: keys, mountPath: /etc/baton/keys, readOnly: true}
{{- end }}
{{- with .own.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "baton.volumes" -}}
- name: tmp
  emptyDir: {}
{{- with .root.Values.model.volume }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .root.Values.config }}
- name: config
  configMap: {name: {{ include "baton.name" .root }}}
{{- end }}
{{- with .root.Values.tls.existingSecret }}
- name: tls
  secret:
    secretName: {{ quote . }}
    defaultMode: 0440
    items:
      - {key: ca.crt, path: ca.crt}
      - {key: {{ $.certificate }}.crt, path: {{ $.certificate }}.crt}
      - {key: {{ $.certificate }}.key, path: {{ $.certificate }}.key}
{{- end }}
{{- with .root.Values.apiKeys.existingSecret }}
- name: keys
  secret: {secretName: {{ quote . }}, defaultMode: 0440}
{{- end }}
{{- with .own.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* What a pod is, whoever makes it. */}}
{{- define "baton.podMeta" -}}
labels:
  {{- /* The chart's own labels win: services and policies choose pods by them. */}}
  {{- toYaml (mergeOverwrite (deepCopy .own.podLabels) (include "baton.labels" . | fromYaml)) | nindent 2 }}
annotations:
  {{- /* A changed configuration file is a new revision. */}}
  checksum/config: {{ .root.Values.config | sha256sum }}
  {{- with .own.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "baton.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "baton.name" .) "default" .Values.serviceAccount.create) }}
{{- end }}

{{- /* Routers that change the number of nodes have an account of their own, so that nodes don't get its rights. */}}
{{- define "baton.scalerAccount" -}}
{{ include "baton.name" . }}-scaler
{{- end }}

{{- /* The roles whose number of pods routers change: encode nodes only up to a number of their own. */}}
{{- define "baton.scaledRoles" -}}
{{- $roles := splitList " " (include "baton.nodeRoles" .) }}
{{- if not (hasKey (.Values.router.flags | default dict) "max-encode-nodes") }}{{ $roles = without $roles "encode" }}{{ end }}
{{- if .Values.scaler.enabled }}{{ join " " $roles }}{{ end }}
{{- end }}

{{- /* Their workloads. */}}
{{- define "baton.scaler" -}}
{{- $kind := ternary "leaderworkersets" "deployments" (eq .Values.nodes.kind "LeaderWorkerSet") }}
{{- $name := include "baton.name" . | trim }}
{{- $pools := list }}
{{- range $role := splitList " " (include "baton.scaledRoles" .) }}{{ $pools = append $pools (printf "%s=%s/%s-%s" $role $kind $name $role) }}{{ end }}
{{- printf "kubernetes:%s" (join "," $pools) }}
{{- end }}

{{- define "baton.podSpec" -}}
{{- $scales := and .root.Values.scaler.enabled (eq .role "router") }}
serviceAccountName: {{ ternary (include "baton.scalerAccount" .root) (include "baton.serviceAccount" .root | trim) $scales | quote }}
automountServiceAccountToken: {{ $scales }}
{{- /* Variables named after services would be taken for configuration. */}}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
{{- with .own.priorityClassName }}
priorityClassName: {{ quote . }}
{{- end }}
{{- with .own.runtimeClassName }}
runtimeClassName: {{ quote . }}
{{- end }}
{{- with .own.initContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- $selector := dict "labelSelector" (dict "matchLabels" (include "baton.selector" $ | fromYaml)) }}
  {{- range . }}
  - {{- toYaml (hasKey . "labelSelector" | ternary . (merge (deepCopy .) $selector)) | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "baton.scheme" -}}
{{ if .Values.tls.existingSecret }}HTTPS{{ else }}HTTP{{ end }}
{{- end }}

{{- define "baton.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: {{ .port }}, scheme: {{ include "baton.scheme" .root }}}
  periodSeconds: 5
  {{- /* A model may take half an hour to load. */}}
  failureThreshold: 360
livenessProbe:
  httpGet: {path: /livez, port: {{ .port }}, scheme: {{ include "baton.scheme" .root }}}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: {{ .port }}, scheme: {{ include "baton.scheme" .root }}}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}

{{- /* The number of processes that compute the model of a node with these flags. */}}
{{- define "baton.ranks" -}}
{{- $flags := . | default dict }}
{{- mul (get $flags "tp" | default 1 | int64) (get $flags "pp" | default 1 | int64) }}
{{- end }}

{{- /* A quantity of Kubernetes or a size of Baton (`500m`, `1.5Gi`, `40GiB`) in thousandths. */}}
{{- define "baton.thousandths" -}}
{{- $text := . | toString }}
{{- $unit := regexFind "[A-Za-z]+$" $text }}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1e3 "K" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "E" 1e18 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 "Ei" 1152921504606846976.0 }}
{{- printf "%.0f" (mulf (trimSuffix $unit $text | float64) (get $factors (trimSuffix "B" $unit)) 1000.0) }}
{{- end }}

{{- /* What a node of several ranks requests, or may use at most: the quantity of one rank, and that of each further one. */}}
{{- define "baton.quantityOfRanks" -}}
{{- $sum := addf (include "baton.thousandths" .one | float64) (mulf (include "baton.thousandths" .each | float64) .more) }}
{{- if eq .name "cpu" }}{{ printf "%.0fm" $sum }}{{ else }}{{ printf "%.0fMi" (ceil (divf $sum 1048576000.0)) }}{{ end }}
{{- end }}

{{- /* The requests and limits of a role's nodes, without devices. */}}
{{- define "baton.nodeResources" -}}
{{- $resources := deepCopy ((index .Values .role).resources | default dict) }}
{{- $more := sub (include "baton.ranks" (index .Values .role).flags | int64) 1 }}
{{- if gt $more 0 }}
{{- range $kind := list "requests" "limits" }}
{{- $amounts := get $resources $kind | default dict }}
{{- range $name, $each := $.Values.nodes.rankResources }}
{{- if hasKey $amounts $name }}
{{- $_ := set $amounts $name (include "baton.quantityOfRanks" (dict "name" $name "one" (get $amounts $name) "each" $each "more" $more)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- toYaml $resources }}
{{- end }}

{{- /* A pod that would be killed for its memory, or whose node would refuse to start, is not made. */}}
{{- define "baton.checkRanks" -}}
{{- range $role := splitList " " (include "baton.nodeRoles" $) }}
{{- $own := index $.Values $role }}
{{- $flags := $own.flags | default dict }}
{{- if $own.gpus }}
{{- if gt (get $flags "tp" | default 1 | int64) 1 }}{{ fail (printf "%s.gpus: the ranks of a stage (the flag tp) compute on cores, and this node would refuse a GPU" $role) }}{{ end }}
{{- if gt (get $flags "pp" | default 1 | int64) (int64 $own.gpus) }}{{ fail (printf "%s.gpus: each stage (the flag pp) computes on a GPU of its own" $role) }}{{ end }}
{{- else if hasKey $flags "kv-cache-memory" }}
{{- $limits := get (include "baton.nodeResources" (dict "Values" $.Values "role" $role) | fromYaml) "limits" | default dict }}
{{- if hasKey $limits "memory" }}
{{- $cache := get $flags "kv-cache-memory" }}
{{- if le (include "baton.thousandths" (get $limits "memory") | float64) (include "baton.thousandths" $cache | float64) }}{{ fail (printf "%s.resources.limits.memory: %v has no room for the KV cache (the flag kv-cache-memory, %v) and the weights" $role (get $limits "memory") $cache) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "baton.checkHosts" -}}
{{- if gt (int .Values.encode.hosts) 1 }}{{ fail "encode.hosts: an encode node is one process; leave it out" }}{{ end }}
{{- range $role := splitList " " (include "baton.nodeRoles" $) }}
{{- $own := index $.Values $role }}
{{- if gt (int $own.hosts) 1 }}
{{- if eq $.Values.nodes.kind "Deployment" }}{{ fail (printf "%s.hosts: a Deployment does not start and stop the pods of a node together; set nodes.kind to LeaderWorkerSet or DisaggregatedSet" $role) }}{{ end }}
{{- if gt (get ($own.flags | default dict) "pp" | default 1 | int64) 1 }}{{ fail (printf "%s.hosts: a node on several hosts has one stage on each, so leave the flag pp out" $role) }}{{ end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The pods of a node in a LeaderWorkerSet: one, or one for each of its hosts, of which the leader is the first. */}}
{{- define "baton.nodePods" -}}
{{- $hosts := int ((index .root.Values .role).hosts | default 1) -}}
size: {{ $hosts }}
{{- if gt $hosts 1 }}
{{- /* A node that has lost a host has ended, and so has one of which a pod is stopped: its first host drains, too. */}}
restartPolicy: RecreateGroupOnPodRestart
leaderTemplate:
  {{- include "baton.nodePod" (dict "root" .root "role" .role) | nindent 2 }}
{{- end }}
workerTemplate:
  {{- include "baton.nodePod" (dict "root" .root "role" .role "isStage" (gt $hosts 1)) | nindent 2 }}
{{- end }}

{{- /* A pod of one role of nodes: a template that Deployments and LeaderWorkerSets share. `isStage`: of a host that is not
the first of its node. It computes for that one, and has neither an address nor a page of its own. */}}
{{- define "baton.nodePod" -}}
{{- $own := index .root.Values .role }}
{{- $isAcrossHosts := gt (int $own.hosts) 1 }}
{{- if $isAcrossHosts }}
{{- /* Two hosts of a node on one machine would share its network. The label of one node's pods is not known here. */}}
{{- $others := dict "labelSelector" (dict "matchLabels" (include "baton.selector" . | fromYaml)) "topologyKey" "kubernetes.io/hostname" }}
{{- $apart := dict "preferredDuringSchedulingIgnoredDuringExecution" (list (dict "weight" 100 "podAffinityTerm" $others)) }}
{{- $affinity := deepCopy ($own.affinity | default dict) }}
{{- if not (hasKey $affinity "podAntiAffinity") }}{{ $_ := set $affinity "podAntiAffinity" $apart }}{{ end }}
{{- $own = set (deepCopy $own) "affinity" $affinity }}
{{- end }}
{{- $all := dict "root" .root "role" .role "own" $own "certificate" "node" "port" "metrics" }}
metadata:
  {{- include "baton.podMeta" $all | nindent 2 }}
spec:
  {{- include "baton.podSpec" $all | nindent 2 }}
  terminationGracePeriodSeconds: {{ add (int .root.Values.drainSeconds) 15 }}
  containers:
    - name: node
      {{- include "baton.image" .root | nindent 6 }}
      {{- /* No preStop: the signal itself drains, routers hear of it at once, and a second signal would not wait. */}}
      args:
        - node
        - --role
        - {{ .role }}
        - --node-id
        - $({{ ternary "LEADER_NAME" "POD_NAME" (.isStage | default false) }})
        - --port
        - "50061"
        - --metrics-port
        - "9400"
        {{- if $isAcrossHosts }}
        - --hosts
        - {{ $own.hosts | toString | quote }}
        - --first-host
        - $(LWS_LEADER_ADDRESS):50062
        {{- end }}
        {{- include "baton.commonArgs" $all | nindent 8 }}
        {{- include "baton.flags" $own.flags | nindent 8 }}
      env:
        {{- include "baton.env" $all | nindent 8 }}
        {{- if .isStage }}
        - name: LEADER_NAME
          valueFrom: {fieldRef: {fieldPath: "metadata.annotations['leaderworkerset.sigs.k8s.io/leader-name']"}}
        - name: BATON_HOST_RANK
          valueFrom: {fieldRef: {fieldPath: "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']"}}
        {{- else }}
      ports:
        - {name: node, containerPort: 50061}
        - {name: metrics, containerPort: 9400}
        {{- if $isAcrossHosts }}
        - {name: hosts, containerPort: 50062}
        {{- end }}
      {{- include "baton.probes" $all | nindent 6 }}
        {{- end }}
      resources:
        {{- $resources := include "baton.nodeResources" (dict "Values" .root.Values "role" .role) | fromYaml }}
        {{- $devices := dict }}
        {{- if $own.gpus }}{{ $_ := set $devices .root.Values.gpuResource ($own.gpus | int) }}{{ end }}
        {{- if $own.rdma }}{{ $_ := set $devices .root.Values.rdmaResource ($own.rdma | int) }}{{ end }}
        {{- toYaml (merge $resources (dict "limits" $devices)) | nindent 8 }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        {{- /* Memory that an RDMA device reads must not move. */}}
        capabilities: {drop: [ALL]{{ if $own.rdma }}, add: [IPC_LOCK]{{ end }}}
      volumeMounts:
        - {name: shm, mountPath: /dev/shm}
        {{- include "baton.mounts" $all | nindent 8 }}
  volumes:
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ .root.Values.sharedMemory }}}
    {{- include "baton.volumes" $all | nindent 4 }}
{{- end }}
