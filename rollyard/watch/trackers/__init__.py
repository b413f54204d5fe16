"""Programs that keep the metrics of many runs, each as a `Sink`; their packages are extras, imported where one is made."""
