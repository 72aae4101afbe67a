from django.db import migrations, models

# What no beat had told yet is told by the first worker.
TO_TELL = """
UPDATE reconciliation_signal SET tell_at = clock_timestamp()
 WHERE NOT told_open OR (NOT told_cleared AND cleared_at IS NOT NULL)
"""


class Migration(migrations.Migration):
    dependencies = [
        ("reconciliation", "0014_windows_of_limits"),
    ]

    operations = [
        migrations.RemoveIndex(
            model_name="signal",
            name="signal_untold",
        ),
        migrations.AddField(
            model_name="signal",
            name="tries",
            field=models.IntegerField(default=0),
        ),
        migrations.AddField(
            model_name="signal",
            name="tell_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.AddField(
            model_name="signal",
            name="not_told_at",
            field=models.DateTimeField(null=True),
        ),
        migrations.RunSQL(TO_TELL, migrations.RunSQL.noop),
        # The watch looks at open runs alone, however many have ended.
        migrations.AddIndex(
            model_name="run",
            index=models.Index(
                condition=models.Q(("settled_at__isnull", True)), fields=["created_at"], name="run_open"
            ),
        ),
        migrations.AddIndex(
            model_name="signal",
            index=models.Index(
                condition=models.Q(("tell_at__isnull", False)), fields=["tell_at"], name="signal_to_tell"
            ),
        ),
    ]
