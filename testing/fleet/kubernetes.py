"""Checks Kubernetes manifests against the schemas of the API, strictly: unknown fields are errors. Needs no cluster.

    python testing/fleet/kubernetes.py deploy/kubernetes/fleet.yaml
"""

import sys

import kubernetes_validate
import yaml

VERSION = "1.33"

for path in sys.argv[1:]:
    with open(path) as file:
        manifests = list(yaml.safe_load_all(file))
    for manifest in manifests:
        kubernetes_validate.validate(manifest, VERSION, strict=True)
    # What selects pods must be what labels them.
    labels = [m["spec"]["template"]["metadata"]["labels"] for m in manifests if m["kind"] == "Deployment"]
    for manifest in manifests:
        selector = manifest.get("spec", {}).get("selector", {})
        selector = selector.get("matchLabels", selector)
        assert not selector or selector in labels, f"{path}: nothing has the labels {selector}"
    print(f"{path}: {len(manifests)} manifests fit the schemas of Kubernetes {VERSION}")
