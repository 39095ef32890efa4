"""Answers from passages whose K and V lie on SSD: time to the first token, sharing, right answers
and references, and what reusing passages costs in quality."""
