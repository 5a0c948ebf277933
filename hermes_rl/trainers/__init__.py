"""Feed trainers: the interface of a trainer, and the mode that serves one.

Owns delivery: which groups a trainer gets, once each, and what it has taken.

Entry points: `Trainer` is the interface, `Serving` serves one, `AtroposTrainer` is that of Atropos' trajectory API.
Left to others: the groups (`runs`), and trainers' own classes (`integrations`).
"""
