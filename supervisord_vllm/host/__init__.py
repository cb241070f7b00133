"""Linux's side: processes, memory, ports, locks, systemd."""
