"""The pages of launchers as they are run: by Slurm, Open MPI, Ray, Monarch and others, here; see `__main__.py`.

    page.py          the blocks of code of these pages
    uneven_rows.py   a training in double precision, whose ranks have uneven numbers of rows; the oracle is one device
    trainings.py     runs of `unisono train`, and how they are compared
    site.py          the folder, the processes and the log of one launcher's checks
    report.py        the table and the log
    slurm.py, ...    one launcher each, and others.py some: what it needs, and what is run

`python -m clusters` needs an environment of its own, which `make clusters` sets up. `test_clusters.py` needs none of
the launchers: `make test` runs it.
"""
