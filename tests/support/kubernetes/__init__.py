"""What tests of Kubernetes need: the schemas of objects, and pods without a cluster."""
