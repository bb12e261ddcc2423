"""A Grafana dashboard and Prometheus alerts for the metrics of `ray_ckpt.telemetry`."""
