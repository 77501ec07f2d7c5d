"""`python -m dsv4`."""

from dsv4.cli.main import main

raise SystemExit(main())
